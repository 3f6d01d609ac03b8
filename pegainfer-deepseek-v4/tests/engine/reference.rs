//! The engine against the model written again in f64, and against the ways to get it wrong.

use crate::oracle::{Mistake, Oracle};
use crate::stored::{self, Numbers};
use crate::support::{LoadOptions, difference, engine, fixture, logits, model_path, options};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::DType;
use pegainfer_core::weights::Source;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::{DeepSeekV4, Options, RankConfig};
use pegainfer_kernels::ops::deepseek_v4::Experts;
use pegainfer_runtime::load_rank_weights;
use std::collections::HashMap;
use std::sync::LazyLock;

/// The checkpoint as numbers, decoded once.
static WEIGHTS: LazyLock<HashMap<String, Numbers>> = LazyLock::new(|| stored::read(&model_path()));
/// Rows that are compared.
const ROWS: usize = 16;

/// Long enough for an entry of the heavy layer, and for more entries than the indexer chooses.
fn text() -> Vec<u32> {
    let cases = fixture().cases;
    cases.iter().find(|case| case.name == "long_stories").unwrap().prompt_ids[..140].to_vec()
}

/// Log-probabilities of the oracle after the last `rows` tokens of `text`.
fn expected(text: &[u32], quantize: bool, mistake: Mistake, rows: usize) -> Vec<Vec<f64>> {
    Oracle { weights: &WEIGHTS, quantize, mistake }.logits(text, rows)
}

/// Log-probabilities of the engine after the last [`ROWS`] tokens of [`text`], in f32, computed once.
static IN_F32: LazyLock<Vec<Vec<f32>>> =
    LazyLock::new(|| logits(&mut engine(1, &options(Numerics::F32)), &text(), 33, ROWS));

fn largest_difference(a: &[Vec<f64>], b: &[Vec<f32>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max)
}

#[test]
fn f32_semantics_equal_f64_to_f32_noise() {
    let off = largest_difference(&expected(&text(), false, Mistake::None, ROWS), &IN_F32);
    println!("largest difference {off:.2e}");
    assert!(off < 1e-3, "off by {off}");
}

/// A checkpoint as training or a tool that dequantises produces it.
#[test]
fn a_bf16_checkpoint_gives_what_the_quantised_one_gives() {
    let dir = std::env::temp_dir().join(format!("pegainfer-dsv4-bf16-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    stored::write_dequantised(&dir);
    let dequantised = LoadOptions { model_path: dir.clone(), ..options(Numerics::F32) };
    let got = logits(&mut engine(1, &dequantised), &text(), 33, ROWS);
    std::fs::remove_dir_all(&dir).unwrap();
    let off = difference(&IN_F32, &got);
    assert!(off < 1e-4, "off by {off}");
}

/// One value rounded differently because of f32 noise can change every later token, so long texts diverge by as much as
/// the roundings matter. In short texts that is rare: most must agree to f32 noise. Each has a compressed entry and
/// every kind of rounding. How many diverge depends on the order of sums, and so on the device.
#[test]
fn quantised_semantics_equal_f64_where_no_rounding_falls_the_other_way() {
    let numerics = Numerics { activations: DType::F32, ..Numerics::REFERENCE };
    let mut engine = engine(1, &options(numerics));
    let (mut exact, mut rounded) = (0, 0);
    let text = text();
    let slices: Vec<&[u32]> = text.chunks_exact(6).collect();
    for slice in &slices {
        let got = logits(&mut engine, slice, 4, 2);
        let off = largest_difference(&expected(slice, true, Mistake::None, 2), &got);
        let without = largest_difference(&expected(slice, false, Mistake::None, 2), &got);
        println!("with the oracle's roundings {off:.2e}, without {without:.2e}");
        exact += usize::from(off < 1e-4);
        rounded += usize::from(without > 0.02);
    }
    let all = slices.len();
    assert!(3 * exact >= 2 * all, "only {exact} of {all} texts agree");
    assert!(rounded + 1 >= all, "the roundings change {rounded} of {all} texts only: nothing is tested");
}

/// The comparison above would see the mistake.
fn is_seen(mistake: Mistake) {
    let off = largest_difference(&expected(&text(), false, mistake, ROWS), &IN_F32);
    assert!(off > 0.01, "{mistake:?} changes log-probabilities by {off} only");
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

fn bits_equal(name: &str, (n, k): (usize, usize), values: &[f32], stored: &Numbers) {
    assert_eq!([n, k], stored.shape[..], "{name}");
    for (i, (got, expected)) in values.iter().zip(&stored.values).enumerate() {
        // The factors multiply exactly in f32, and so is their sign, that of zero included.
        assert_eq!(got.to_bits(), (*expected as f32).to_bits(), "{name}, element {i}");
    }
}

#[test]
fn trap_08_dequantised_weights_equal_the_formulas_bit_for_bit() {
    let stored = &*WEIGHTS;
    let mut ranks = [(Exec::cpu(Isa::Portable, Some(2)).unwrap(), Shard::WHOLE)];
    let config = RankConfig::new(Config::load(&model_path()).unwrap(), Options::default());
    let source = Source::open(&model_path()).unwrap();
    let loaded = load_rank_weights::<DeepSeekV4>(&mut ranks, &config, &source, &mut |_| {}).unwrap();
    let weights = &loaded[0];
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
        let named = |Experts { gate, up, down, .. }: &Experts| {
            [("w1", gate), ("w3", up), ("w2", down)].map(|(w, m)| (w, m.shape(), m.dequantize()))
        };
        let expected = |name: &str, w: &str| &stored[&format!("layers.{i}.ffn.{name}.{w}.weight")];
        for (w, (n, k), values) in named(&layer.moe.shared) {
            bits_equal("shared_experts", (n, k), &values, expected("shared_experts", w));
        }
        let count = layer.moe.experts.count;
        for (w, (n, k), values) in named(&layer.moe.experts) {
            for (e, values) in values.chunks(n / count * k).enumerate() {
                let name = format!("experts.{e}");
                bits_equal(&name, (n / count, k), values, expected(&name, w));
            }
        }
    }
    for (name, matrix) in &matrices {
        bits_equal(name, matrix.shape(), &matrix.dequantize(), &stored[&format!("{name}.weight")]);
    }
    assert!(matrices.iter().filter(|(_, matrix)| matrix.is_quantized()).count() == 27);
}
