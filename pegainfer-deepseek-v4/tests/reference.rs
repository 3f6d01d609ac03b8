//! The engine against the model written again in f64, and against the ways to get it wrong.

#![cfg(feature = "deepseek-v4")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/oracle.rs"]
mod oracle;
#[path = "support/stored.rs"]
mod stored;
mod support;

use oracle::{Mistake, Oracle};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::DType;
use pegainfer_core::weights::Checkpoint;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::shard::Shard;
use pegainfer_deepseek_v4::weights::Weights;
use pegainfer_kernels::ops::deepseek_v4::{Expert, Matrix};
use stored::Numbers;
use support::{engine, fixture, logits, model_path, options};

/// Rows that are compared.
const ROWS: usize = 16;

/// Long enough for an entry of the heavy layer, and for more entries than the indexer chooses.
fn text() -> Vec<u32> {
    let cases = fixture().cases;
    cases.iter().find(|case| case.name == "long_stories").unwrap().prompt_ids[..140].to_vec()
}

/// Largest and mean difference between the engine's log-probabilities and the oracle's.
fn compare(numerics: Numerics, mistake: Mistake) -> (f64, f64) {
    let weights = stored::read();
    let oracle = Oracle { weights: &weights, quantize: numerics.quantize_kv, mistake };
    let expected = oracle.logits(&text(), ROWS);
    let got = logits(&mut engine(1, &options(numerics)), &text(), 33, ROWS);
    let pairs = || expected.iter().flatten().zip(got.iter().flatten());
    let off: Vec<f64> = pairs().map(|(e, g)| (e - f64::from(*g)).abs()).collect();
    (off.iter().copied().fold(0.0, f64::max), off.iter().sum::<f64>() / off.len() as f64)
}

#[test]
fn f32_semantics_equal_f64_to_f32_noise() {
    let (max, _) = compare(Numerics::F32, Mistake::None);
    assert!(max < 1e-3, "off by {max}");
}

/// A value that falls on the other side of a rounding moves everything after it a little, so not every bit is the same.
#[test]
fn quantised_semantics_equal_f64_but_for_roundings_that_fall_the_other_way() {
    let numerics = Numerics { activations: DType::F32, ..Numerics::REFERENCE };
    let (max, mean) = compare(numerics, Mistake::None);
    let (without, _) = compare(Numerics::F32, Mistake::None);
    println!("f32 activations: max {max:.2e}, mean {mean:.2e}; without roundings {without:.2e}");
    assert!(max < 0.05 && mean < 0.005, "off by {max}, {mean} on average");
    let (max, mean) = compare(Numerics::REFERENCE, Mistake::None);
    println!("bf16 activations: max {max:.2e}, mean {mean:.2e}");
    assert!(mean < 0.1, "off by {max}, {mean} on average");
}

/// The comparison above would see the mistake.
fn is_seen(mistake: Mistake) {
    let (max, _) = compare(Numerics::F32, mistake);
    assert!(max > 0.01, "{mistake:?} changes log-probabilities by {max} only");
}

#[test]
fn trap_01_mscale_would_be_seen() {
    is_seen(Mistake::Mscale);
}

#[test]
fn trap_02_entries_rotate_by_their_first_token_and_with_their_own_theta() {
    is_seen(Mistake::EntryPosition);
    is_seen(Mistake::OneTheta);
}

#[test]
fn trap_03_the_output_is_rotated_back() {
    is_seen(Mistake::Rotated);
}

#[test]
fn trap_04_a_comb_that_is_not_transposed_would_be_seen() {
    is_seen(Mistake::Comb);
}

#[test]
fn trap_05_before_the_first_entry_there_is_nothing_not_zero() {
    is_seen(Mistake::ZerosBefore);
}

#[test]
fn a_sink_that_is_left_out_would_be_seen() {
    is_seen(Mistake::NoSink);
}

fn bits_equal(name: &str, matrix: &Matrix, stored: &Numbers) {
    assert_eq!([matrix.shape().0, matrix.shape().1], stored.shape[..], "{name}");
    let values = matrix.dequantize();
    for (i, (got, expected)) in values.iter().zip(&stored.values).enumerate() {
        // The products are exact in f32, and so is their sign, that of zero included.
        assert_eq!(got.to_bits(), (*expected as f32).to_bits(), "{name}, element {i}");
    }
}

#[test]
fn trap_08_dequantised_weights_equal_the_formulas_bit_for_bit() {
    let (stored, mut exec) = (stored::read(), Exec::cpu(Isa::Portable, Some(2)).unwrap());
    let config = Config::load(&model_path()).unwrap();
    let checkpoint = Checkpoint::open(&model_path()).unwrap();
    let weights = Weights::load(&mut exec, &config, Shard::WHOLE, Some(&checkpoint), &mut |_| {}).unwrap();
    let mut matrices = vec![("head".to_owned(), &weights.head)];
    for (i, layer) in weights.layers.iter().enumerate() {
        let mut add = |tail: String, matrix| matrices.push((format!("layers.{i}.{tail}"), matrix));
        let attn = &layer.attn;
        add("attn.wq_a".into(), &attn.wq_a);
        add("attn.wq_b".into(), &attn.wq_b);
        add("attn.wkv".into(), &attn.wkv);
        add("attn.wo_a".into(), &attn.wo_a);
        add("attn.wo_b".into(), &attn.wo_b);
        if let Some(indexer) = &attn.indexer {
            add("attn.indexer.wq_b".into(), &indexer.wq_b);
        }
        let mut expert = |name: String, expert: &'_ _| {
            let Expert { gate, up, down }: &Expert = expert;
            for (w, matrix) in [("w1", gate), ("w3", up), ("w2", down)] {
                bits_equal(&name, matrix, &stored[&format!("layers.{i}.ffn.{name}.{w}.weight")]);
            }
        };
        expert("shared_experts".into(), &layer.moe.shared);
        layer.moe.experts.iter().enumerate().for_each(|(e, one)| expert(format!("experts.{e}"), one));
    }
    for (name, matrix) in &matrices {
        bits_equal(name, matrix, &stored[&format!("{name}.weight")]);
    }
    assert!(matrices.iter().filter(|(_, matrix)| matrix.is_quantized()).count() == 27);
}
