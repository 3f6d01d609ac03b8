//! Prompts with images against reference outputs in f32. transformers in bf16 changes tokens at margins up to 0.012 and
//! 0.052, and log-probabilities by up to 0.23 nats.

use crate::image_support::{ImageCase, ImageFixture, MODELS, image_options};
use crate::support::{best, engine, run, with_logprobs};
use pegainfer_core::engine::{GenerateRequest, MAX_LOGPROBS};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::images::rope_position;
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::DType;
use pegainfer_kernels::ops::{self, HeadShape, Heads, KvDType};

/// Margin above which tokens must agree. A GPU, whose kernels depend on the batch, changes one of 0.072.
const MARGIN: f64 = 0.08;
/// Mean and largest difference of log-probabilities of the five most likely tokens, nats.
const NOISE: (f64, f64) = (0.03, 0.3);

#[test]
fn positions_are_those_of_the_reference() {
    for model in MODELS {
        let fixture = ImageFixture::of(model);
        for case in &fixture.cases {
            let (spans, len) = (fixture.spans(case), case.text.prompt_ids.len());
            for i in 0..len {
                let expected = [0, 1, 2].map(|axis| case.positions_thw[axis][i]);
                assert_eq!(rope_position(&spans, i), expected, "{}, token {i}", case.text.name);
            }
            for i in [len, len + 30] {
                let expected = (i as i64 + case.position_delta) as u32;
                assert_eq!(rope_position(&spans, i), [expected; 3], "{}", case.text.name);
            }
        }
    }
}

/// A head that is 1 in the first half of the rotated elements and 0 in the second becomes cosines and sines.
#[test]
fn rotations_are_those_of_the_reference() {
    let fixture = ImageFixture::of(MODELS[0]);
    let case = fixture.case("two_images");
    assert!(case.rope.iter().any(|rope| rope.thw[1] != rope.thw[2]));
    let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
    let (shape, tokens) = (HeadShape { heads: 1, kv_heads: 1, head_dim: 256 }, case.rope.len());
    let mut tensor = |name: &str, shape: &[usize], dtype| exec.tensor(name, shape, dtype).unwrap();
    let mut projected = tensor("projected", &[tokens, shape.gated_qkv_width()], DType::Bf16);
    for row in projected.host_mut::<half::bf16>().chunks_exact_mut(shape.gated_qkv_width()) {
        row[..32].fill(half::bf16::ONE);
    }
    // The norm makes them sqrt(256 / 32).
    let mut norm = tensor("norm", &[256], DType::F32);
    norm.host_mut::<f32>().fill((32.0f32 / 256.0).sqrt());
    let (mut positions, mut slots) =
        (tensor("positions", &[tokens, 3], DType::U32), tensor("s", &[tokens], DType::U32));
    let at = case.rope.iter().map(|rope| rope_position(&fixture.spans(case), rope.index));
    positions.host_mut::<u32>().copy_from_slice(&at.flatten().collect::<Vec<_>>());
    slots.host_mut::<u32>().iter_mut().zip(0..).for_each(|(slot, i)| *slot = i);
    let [k, v] = shape.cache(Device::Cpu(Isa::best()), KvDType::Bf16, 1);
    let (mut k, mut v) = (tensor("k", &k, DType::Bf16), tensor("v", &v, DType::Bf16));
    let mut q = tensor("q", &[tokens, 256], DType::Bf16);
    let rope = ops::rope_table(&mut exec, 256, 64, 1e7).unwrap();
    let heads = Heads { shape, norms: (&norm, &norm), eps: 0.0, rope: &rope, positions: &positions, slots: &slots };
    ops::gated_qk_norm_rope_write_kv(&mut exec, &projected, &heads, &mut q, (&mut k, &mut v)).unwrap();
    for (rope, q) in case.rope.iter().zip(q.host::<half::bf16>().chunks_exact(256)) {
        let expected = rope.cos.iter().take(32).chain(rope.sin.iter().take(32));
        for (got, expected) in q.iter().zip(expected) {
            assert!((got.to_f32() - expected).abs() < 4e-3, "token {}: {got} {expected}", rope.index);
        }
    }
}

/// Checks each step after the reference's own tokens.
#[test]
fn every_step_with_images_agrees_with_the_reference() {
    for model in MODELS {
        let fixture = ImageFixture::of(model);
        let (mut engine, mut errors, mut steps) = (engine(best(), &image_options(model)), Vec::new(), 0);
        for case in &fixture.cases {
            for (i, top) in case.text.top20.iter().enumerate() {
                let request = fixture.request(case, i, 1);
                let request = GenerateRequest { logprobs: Some(MAX_LOGPROBS), ..request };
                let token = run(&mut engine, &[request]).remove(0).tokens.remove(0);
                steps += 1;
                if case.text.margins[i] > MARGIN {
                    assert_eq!(token.id, case.text.greedy_ids[i], "{model}, {}, step {i}", case.text.name);
                }
                let ours = token.logprobs.unwrap().top;
                for (id, expected) in top.ids.iter().zip(&top.logprobs).take(5) {
                    let our = ours.iter().find(|(ours, _)| ours == id).unwrap().1;
                    errors.push((f64::from(our) - expected).abs());
                }
            }
        }
        let (mean, max) =
            (errors.iter().sum::<f64>() / errors.len() as f64, errors.iter().copied().fold(0.0, f64::max));
        println!("{model}: {steps} steps, error mean {mean:.4}, max {max:.4}");
        assert!(mean <= NOISE.0 && max <= NOISE.1, "{model}: mean {mean}, max {max}");
    }
}

/// All together, and each alone.
#[test]
fn greedy_text_with_images_equals_the_reference() {
    for model in MODELS {
        let fixture = ImageFixture::of(model);
        let request = |case: &ImageCase| fixture.request(case, 0, case.text.greedy_ids.len());
        let requests: Vec<_> = fixture.cases.iter().map(request).map(with_logprobs).collect();
        for rows in [requests.len(), 1] {
            let mut engine = engine(best(), &image_options(model));
            let outputs = requests.chunks(rows).flat_map(|requests| run(&mut engine, requests));
            let mut compared = 0;
            for (case, output) in fixture.cases.iter().zip(outputs) {
                let margins = &case.text.margins;
                let decided = margins.iter().position(|margin| *margin <= MARGIN).unwrap_or(margins.len());
                assert_eq!(output.ids()[..decided], case.text.greedy_ids[..decided], "{model}, {}", case.text.name);
                compared += decided;
            }
            println!("{model}, {rows} rows: {compared} tokens");
            assert!(compared >= 100, "{model}: only {compared} tokens were compared");
        }
    }
}
