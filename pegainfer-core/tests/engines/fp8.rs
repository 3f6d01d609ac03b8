//! FP8 checkpoints made of bundled ones, and the tests of FP8 weights that are the same for every model.

use super::{Case, Output, Target, greedy, invariance::Alone, run};
use half::{bf16, f16};
use pegainfer_core::engine::{GenerateRequest, StepEngine, TokenLogprobs};
use pegainfer_core::isa::Isa;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Edge of a block.
const BLOCK: usize = 128;
/// Ends of the names of the weights that official FP8 checkpoints have in FP8.
const QUANTIZED: [&str; 10] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
];

/// Method by which a test rounds weights to FP8.
#[derive(Clone, Copy, PartialEq)]
pub enum Scales {
    /// `amax / 448` in f32, as at load.
    Exact,
    /// The power of two above it, stored in this dtype: dequantised weights are exact in bf16.
    PowerOfTwo(Dtype),
}

/// A checkpoint in its own directory.
pub struct Checkpoint(pub PathBuf);

impl Drop for Checkpoint {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Name, dtype, shape and bytes.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

impl Checkpoint {
    /// A copy of the checkpoint in `from` with tensors passed through `change`.
    fn new(from: &Path, name: &str, config: Value, change: impl Fn(&str, &TensorView<'_>) -> Vec<Stored>) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-fp8-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::copy(from.join("generation_config.json"), dir.join("generation_config.json")).unwrap();
        let mut written: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
        written["quantization_config"] = config;
        std::fs::write(dir.join("config.json"), written.to_string()).unwrap();
        let file = std::fs::read(from.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let stored: Vec<Stored> = tensors.iter().flat_map(|(name, view)| change(name, &view)).collect();
        let views = stored
            .iter()
            .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
        Self(dir)
    }

    /// The checkpoint in FP8, without the scales of the weight `without`.
    pub fn fp8(from: &Path, name: &str, scales: Scales, without: &str) -> Self {
        let config = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]});
        Self::new(from, name, config, |name, view| {
            let Some((codes, scale)) = quantize(name, view, scales) else { return vec![same(name, view)] };
            let [rows, cols] = view.shape() else { panic!("{name}") };
            let (dtype, bytes): (_, Vec<u8>) = match scales {
                Scales::PowerOfTwo(Dtype::BF16) => {
                    (Dtype::BF16, scale.iter().flat_map(|s| bf16::from_f32(*s).to_le_bytes()).collect())
                }
                Scales::PowerOfTwo(Dtype::F16) => {
                    (Dtype::F16, scale.iter().flat_map(|s| f16::from_f32(*s).to_le_bytes()).collect())
                }
                _ => (Dtype::F32, scale.iter().flat_map(|s| s.to_le_bytes()).collect()),
            };
            let blocks = vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
            let weight = (name.to_owned(), Dtype::F8_E4M3, view.shape().to_vec(), codes);
            let scale = (format!("{name}_scale_inv"), dtype, blocks, bytes);
            if name.ends_with(without) { vec![weight] } else { vec![weight, scale] }
        })
    }

    /// The checkpoint in bf16, with the values of the FP8 checkpoint whose scales are powers of two.
    pub fn dequantized(from: &Path, name: &str) -> Self {
        Self::new(from, name, Value::Null, |name, view| {
            let Some((codes, scale)) = quantize(name, view, Scales::PowerOfTwo(Dtype::F32)) else {
                return vec![same(name, view)];
            };
            let cols = view.shape()[1];
            let value = |i: usize| value(codes[i]) * scale[i / cols / BLOCK * cols.div_ceil(BLOCK) + i % cols / BLOCK];
            let bytes = (0..codes.len()).flat_map(|i| {
                let rounded = bf16::from_f32(value(i));
                assert_eq!(rounded.to_f32(), value(i), "exact");
                rounded.to_le_bytes()
            });
            vec![(name.to_owned(), Dtype::BF16, view.shape().to_vec(), bytes.collect())]
        })
    }
}

fn same(name: &str, view: &TensorView<'_>) -> Stored {
    (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())
}

/// The value of an e4m3 code that is not NaN, by the definition of the format.
fn value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude =
        if exponent == 0 { mantissa / 8.0 * 2f32.powi(-6) } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Codes and scales of a projection; `None` for other tensors.
fn quantize(name: &str, view: &TensorView<'_>, scales: Scales) -> Option<(Vec<u8>, Vec<f32>)> {
    let module = name.strip_suffix(".weight")?.rsplit('.').next()?;
    if !QUANTIZED.contains(&module) {
        return None;
    }
    let values: Vec<f32> = view.data().as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
    let cols = view.shape()[1];
    let block = |i: usize| i / cols / BLOCK * cols.div_ceil(BLOCK) + i % cols / BLOCK;
    let mut scale = vec![0f32; block(values.len() - 1) + 1];
    values.iter().enumerate().for_each(|(i, v)| scale[block(i)] = scale[block(i)].max(v.abs()));
    for scale in &mut scale {
        *scale /= 448.0;
        if scales != Scales::Exact {
            *scale = scale.log2().ceil().exp2();
        }
    }
    let table: Vec<f32> = (0..0x7f).map(value).collect();
    let nearest = |v: f32| {
        let above = table.partition_point(|t| *t < v.abs()).min(0x7e);
        let below = above.saturating_sub(1);
        let (up, down) = (table[above] - v.abs(), v.abs() - table[below]);
        // Ties go to the even code.
        let code = if up < down || (up == down && above % 2 == 0) { above } else { below };
        code as u8 | if v.is_sign_negative() { 0x80 } else { 0 }
    };
    let codes = values.iter().enumerate().map(|(i, v)| nearest(v / scale[block(i)])).collect();
    Some((codes, scale))
}

/// Log-probabilities of every token of the cases, which do not depend on sampling.
pub fn prompt_logprobs(engine: &mut impl StepEngine, cases: &[Case]) -> Vec<TokenLogprobs> {
    let request = |case: &Case| GenerateRequest { prompt_logprobs: Some(1), ..greedy(&case.text(), 1) };
    let outputs = run(engine, &cases.iter().map(request).collect::<Vec<_>>());
    outputs.into_iter().flat_map(|output: Output| output.prompt.unwrap()).collect()
}

/// Mean and largest difference of the log-probabilities of the same tokens.
pub fn difference(a: &[TokenLogprobs], b: &[TokenLogprobs]) -> (f32, f32) {
    assert_eq!(a.len(), b.len());
    let differences: Vec<f32> = a.iter().zip(b).map(|(a, b)| (a.logprob - b.logprob).abs()).collect();
    (differences.iter().sum::<f32>() / differences.len() as f32, differences.into_iter().fold(0.0, f32::max))
}

/// FP8 weights give the log-probabilities of a bf16 engine with the same values, apart from rounding to bf16.
pub fn equals_dequantized<E: StepEngine>(from: &Path, cases: &[Case], load: impl Fn(&Path) -> E) {
    let bf16 = Checkpoint::dequantized(from, "dequantized");
    let expected = prompt_logprobs(&mut load(&bf16.0), cases);
    for (name, dtype) in [("bf16", Dtype::BF16), ("f16", Dtype::F16)] {
        let fp8 = Checkpoint::fp8(from, name, Scales::PowerOfTwo(dtype), "nothing");
        let (mean, max) = difference(&expected, &prompt_logprobs(&mut load(&fp8.0), cases));
        println!("scales in {dtype:?}: log-probabilities differ by {mean:.4} on average, {max:.4} at most");
        assert!(mean > 0.0 && mean < 0.01 && max < 0.3, "mean {mean}, max {max}");
    }
}

/// Rounding at load gives the same bits as a checkpoint rounded before; both differ from bf16 by the error of the
/// format.
pub fn equals_quantized_at_load<E: StepEngine>(from: &Path, cases: &[Case], load: impl Fn(&Path, bool) -> E) {
    let file = Checkpoint::fp8(from, "exact", Scales::Exact, "nothing");
    let stored = prompt_logprobs(&mut load(&file.0, false), cases);
    let at_load = prompt_logprobs(&mut load(from, true), cases);
    let bits = |all: &[TokenLogprobs]| all.iter().map(|one| one.logprob.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&stored), bits(&at_load));
    let (mean, max) = difference(&stored, &prompt_logprobs(&mut load(from, false), cases));
    println!("FP8 against bf16: log-probabilities differ by {mean:.4} on average, {max:.4} at most");
    assert!(mean > 0.005 && mean < 0.2, "mean {mean}, max {max}");
}

/// An FP8 KV cache changes log-probabilities by the error of the format.
pub fn kv_cache_is_near(cases: &[Case], bf16: &mut impl StepEngine, fp8: &mut impl StepEngine) {
    let (mean, max) = difference(&prompt_logprobs(fp8, cases), &prompt_logprobs(bf16, cases));
    println!("FP8 KV cache against bf16: log-probabilities differ by {mean:.4} on average, {max:.4} at most");
    assert!(mean > 0.001 && mean < 0.1, "mean {mean}, max {max}");
}

/// Requests in chunks and together give the same bits as alone.
pub fn is_batch_invariant<E: StepEngine>(cases: &[Case], whole: &mut E, chunked: &mut E) {
    let alone =
        Alone::new(whole, Target::Cpu(Isa::best()), super::invariance::requests(&cases[..2], &[150, 31, 90], 12));
    alone.holds("together", whole);
    alone.holds("in chunks", chunked);
}
