//! Vocabularies that are no multiple of 8: rows of zeros after the embedding and the output matrix are no tokens.

use crate::checkpoints::{Copy, EMBEDDING, HEAD};
use crate::support::{Engine, Fixture, RANKS, best, bundled_model, e2e, engine, engine_on, greedy, options, run};
use half::bf16;
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::small_floats::e4m3;
use pegainfer_runtime::{LoadOptions, padded_vocab};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use std::collections::BTreeMap;

/// Token ids of the cut checkpoints. None of the fixture's texts has a later one.
const VOCAB: usize = 4094;
/// Width of the residual stream.
const HIDDEN: usize = 320;
const PROMPT: [u32; 4] = [921, 870, 256, 533];

/// The values of the first `vocab` rows of the bundled embedding.
fn rows(copy: &Copy, vocab: usize) -> Vec<bf16> {
    let bytes = copy.tensors()[EMBEDDING].data()[..vocab * HIDDEN * 2].to_vec();
    bytes.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect()
}

/// Writes the bundled checkpoint with `vocab` token ids and these tensors of the output matrix; without any, it is tied.
fn write(copy: &Copy, vocab: usize, head: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
    let embedding = bytes(&rows(copy, vocab));
    let mut tensors: BTreeMap<String, TensorView<'_>> = copy.tensors();
    tensors.insert(EMBEDDING.to_owned(), TensorView::new(Dtype::BF16, vec![vocab, HIDDEN], &embedding).unwrap());
    for (name, dtype, shape, bytes) in head {
        tensors.insert((*name).to_owned(), TensorView::new(*dtype, shape.clone(), bytes).unwrap());
    }
    copy.write("model.safetensors", &tensors);
    copy.set_config("vocab_size", json!(vocab));
    copy.set_config("tie_word_embeddings", json!(head.is_empty()));
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Greedy text that a bias of -100 for every token must not change: a logit of 0 would be above all others.
fn text(engine: &mut Engine) -> Vec<u32> {
    let biased = LogitsProcessorParams {
        logit_bias: (0..engine.limits().vocab_size as u32).map(|id| (id, -100.0)).collect(),
        ..LogitsProcessorParams::default()
    };
    let processors = LogitsProcessors::new(biased, engine.limits().vocab_size).unwrap();
    let plain = GenerateRequest { logprobs: Some(20), ..greedy(&PROMPT, 16) };
    let requests = [greedy(&PROMPT, 16), plain.clone(), GenerateRequest { logits_processors: processors, ..plain }];
    let outputs = run(engine, &requests);
    let ids: Vec<Vec<u32>> = outputs.iter().map(|output| output.ids()).collect();
    assert_eq!((&ids[1], &ids[2]), (&ids[0], &ids[0]));
    let reported = outputs[1].tokens.iter().flat_map(|token| &token.logprobs.as_ref().unwrap().top);
    assert!(reported.clone().count() >= 16 * 20 && reported.clone().all(|(id, _)| (*id as usize) < VOCAB));
    ids.into_iter().next().unwrap()
}

fn bundled_text() -> Vec<u32> {
    let ids = run(&mut engine(best(), &options()), &[greedy(&PROMPT, 16)]).remove(0).ids();
    assert!(ids.iter().all(|id| (*id as usize) < VOCAB));
    ids
}

#[test]
fn padding_is_never_drawn_with_any_number_of_ranks() {
    let (copy, expected) = (Copy::new("vocabulary"), bundled_text());
    write(&copy, VOCAB, &[]);
    for ranks in [&[1][..], RANKS].concat() {
        assert_eq!(padded_vocab(VOCAB, ranks), 4096);
        let mut engine = engine_on(ranks, best(), &copy.options());
        assert_eq!(engine.limits().vocab_size, VOCAB);
        assert_eq!(text(&mut engine), expected, "{ranks} ranks");
    }
}

/// Logits of almost 0: rows of zeros would take 2 of 4,096 parts of the probability.
#[test]
fn padding_has_no_probability() {
    let copy = Copy::new("vocabulary-uniform");
    let small: Vec<bf16> =
        rows(&copy, VOCAB).iter().map(|value| bf16::from_f32(value.to_f32() * 2f32.powi(-24))).collect();
    write(&copy, VOCAB, &[(HEAD, Dtype::BF16, vec![VOCAB, HIDDEN], bytes(&small))]);
    for ranks in [1, 2] {
        let request = GenerateRequest { logprobs: Some(1), ..greedy(&PROMPT, 4) };
        let output = run(&mut engine_on(ranks, best(), &copy.options()), &[request]).remove(0);
        for token in &output.tokens {
            let logprob = token.logprobs.as_ref().unwrap().logprob;
            assert!((logprob + (VOCAB as f32).ln()).abs() < 1e-4, "{logprob}");
        }
    }
}

/// Codes with a scale for each row, or for each block, answer as their values in bf16.
#[test]
fn an_fp8_output_matrix_is_padded() {
    // Rounded to the nearest code for a scale of 2^-8, which the table's values fit.
    let mut codes: Vec<u8> = (0..=255).filter(|code| e4m3(*code).is_finite()).collect();
    codes.sort_by(|a, b| e4m3(*a).total_cmp(&e4m3(*b)));
    let nearest = |value: &bf16| {
        let wanted = value.to_f32() * 256.0;
        let above = codes.partition_point(|code| e4m3(*code) < wanted).clamp(1, codes.len() - 1);
        let [low, high] = [codes[above - 1], codes[above]];
        if wanted - e4m3(low) < e4m3(high) - wanted { low } else { high }
    };
    let copy = Copy::new("vocabulary-fp8");
    let head: Vec<u8> = rows(&copy, VOCAB).iter().map(nearest).collect();
    let exact: Vec<bf16> = head.iter().map(|code| bf16::from_f32(e4m3(*code) / 256.0)).collect();
    write(&copy, VOCAB, &[(HEAD, Dtype::BF16, vec![VOCAB, HIDDEN], bytes(&exact))]);
    let expected = text(&mut engine(best(), &copy.options()));

    let scales = |count: usize| 2f32.powi(-8).to_le_bytes().repeat(count);
    let weight = (HEAD, Dtype::F8_E4M3, vec![VOCAB, HIDDEN], head);
    let rows = ("lm_head.weight_scale", Dtype::F32, vec![VOCAB, 1], scales(VOCAB));
    let blocks = ("lm_head.weight_scale_inv", Dtype::F32, vec![32, 3], scales(32 * 3));
    // Two ranks would cut the blocks of KV heads.
    for (scale, ranks) in [(rows, &[1, 2][..]), (blocks, &[1])] {
        write(&copy, VOCAB, &[weight.clone(), scale.clone()]);
        copy.set_config("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
        for ranks in ranks {
            let mut engine = engine_on(*ranks, best(), &copy.options());
            assert_eq!(text(&mut engine), expected, "{}, {ranks} ranks", scale.0);
        }
    }
}

/// The embedding in Q6_K, which is also the output matrix, without its last rows.
#[test]
fn a_quantised_embedding_of_a_gguf_file_is_padded() {
    let name = "qwen3-tiny-256-Q4_K_M";
    let mut file = std::fs::read(bundled_model("qwen3-tiny-256-gguf").join(format!("{name}.gguf"))).unwrap();
    let entry = b"token_embd.weight\x02\0\0\0";
    let at = file.windows(entry.len()).position(|bytes| bytes == entry).unwrap() + entry.len() + 8;
    assert_eq!(file[at..at + 8], 4096u64.to_le_bytes());
    file[at..at + 8].copy_from_slice(&(VOCAB as u64).to_le_bytes());
    let copy = Copy::new("vocabulary-gguf");
    let path = copy.dir.join("model.gguf");
    std::fs::write(&path, file).unwrap();
    let options = LoadOptions { model_path: path, ..options() };
    let mut cut = engine(best(), &options);
    assert_eq!(cut.limits().vocab_size, VOCAB);
    text(&mut cut);
    e2e::greedy_text_equals_the_reference(&Fixture::bundled(name), |target| engine(target, &options));
}
