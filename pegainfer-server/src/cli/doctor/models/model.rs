//! A model whose ops are checked.

#[cfg(feature = "qwen35")]
use super::steps::image_records;
use super::steps::{StepRecords, both, records};
use anyhow::Result;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::tensor::DType;
use pegainfer_kernels::compare::Case;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_qwen3_4b::{self as qwen3, Qwen3};
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::{self as qwen35, Qwen35};
use pegainfer_runtime::Quantization;

/// Rows of a step, new tokens per row, and context tokens.
pub type StepShape = (usize, usize, usize);

/// A model of a family that runs on a GPU.
pub struct Model {
    /// Heads of full attention.
    pub(super) shape: HeadShape,
    pub(super) rope_theta: f64,
    /// Rows and columns of a matrix of dummy weights.
    pub(super) matrix: [usize; 2],
    /// True if only ops with FP8 weights are checked; all others are the same in bf16.
    pub(super) fp8: bool,
    /// Steps to check in addition to those of every model.
    pub more_steps: &'static [StepShape],
    /// Records the ops of a step.
    pub(super) records: StepRecords,
}

/// Steps whose number of tokens is not a multiple of four, to which FP8 by FP8 is padded.
pub(super) const FP8_STEPS: [StepShape; 2] = [(1, 301, 301), (1, 130, 130)];
/// Edge of a block of FP8 weights.
const FP8_BLOCK: usize = 128;

impl Model {
    /// The first of `ranks` of a Qwen3, in bf16 or FP8, with a KV cache in bf16 and in FP8.
    pub(super) fn qwen3(config: qwen3::config::Config, ranks: usize, fp8: bool) -> Self {
        let config = qwen3::config::Config { quantization: fp8.then(|| Quantization::every(&[])), ..config };
        let (heads, rope_theta) = (config.shape, config.rope.theta);
        let shape = HeadShape { heads: heads.heads / ranks, kv_heads: heads.kv_heads / ranks, ..heads };
        let width = config.moe.map_or(config.intermediate_size, |moe| moe.width);
        let matrix = [config.hidden_size, width];
        let fp8_kv = qwen3::config::Config { kv_dtype: ops::KvDType::Fp8, ..config.clone() };
        let records = both(records::<Qwen3>(config, ranks), records::<Qwen3>(fp8_kv, ranks));
        Self { shape, rope_theta, matrix, fp8, more_steps: if fp8 { &FP8_STEPS } else { &[] }, records }
    }

    /// The same of a Qwen3.5.
    #[cfg(feature = "qwen35")]
    pub(super) fn qwen35(config: qwen35::config::Config, ranks: usize, fp8: bool) -> Self {
        let quantization = fp8.then(|| Quantization::every(&qwen35::config::BF16_MODULES));
        let config = qwen35::config::Config { quantization, ..config };
        let (heads, rope_theta) = (config.shape, config.rope.theta);
        let shape = HeadShape { heads: heads.heads / ranks, kv_heads: heads.kv_heads / ranks, ..heads };
        let width = config.moe.map_or(config.intermediate_size, |moe| moe.width);
        let matrix = [config.hidden_size, width];
        let fp8_kv = qwen35::config::Config { kv_dtype: ops::KvDType::Fp8, ..config.clone() };
        let records = both(records::<Qwen35>(config, ranks), records::<Qwen35>(fp8_kv, ranks));
        Self { shape, rope_theta, matrix, fp8, more_steps: if fp8 { &FP8_STEPS } else { &[] }, records }
    }

    /// The vision tower of a Qwen3.5, and the ops that images change.
    #[cfg(feature = "qwen35")]
    pub(super) fn qwen35_tower(config: qwen35::config::Config) -> Self {
        Self { records: image_records::<Qwen35>(config.clone()), ..Self::qwen35(config, 1, false) }
    }

    /// Properties of its calls that shapes do not show.
    pub fn case(&self, context: usize) -> Case {
        Case { shape: self.shape, context, rope_theta: self.rope_theta, exact_in_fp8: self.fp8 }
    }

    /// The ops of a step whose rows all have log-probabilities and logits updates, and the op that makes dummy weights.
    pub fn records(&self, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>> {
        let mut records = (self.records)(batch, tokens, context)?;
        if self.fp8 {
            let rounded = |operands: &[Operand]| operands.iter().any(|operand| operand.dtype == DType::E4m3);
            let first_weight = |record: &OpRecord| if record.op == "experts" { 3 } else { 1 };
            let weight = |record: &OpRecord| {
                record.reads.get(first_weight(record)).is_some_and(|weight| weight.dtype == DType::U8)
            };
            records.retain(|record| weight(record) || rounded(&record.reads) || rounded(&record.writes));
            records.extend(self.quantized()?);
            return Ok(records);
        }
        let mut meta = Exec::meta()?;
        let mut matrix = meta.tensor("dummy weights", &self.matrix, DType::Bf16)?;
        let (filled, dummy) = meta.recording(|exec| ops::uniform(exec, 0, 0.0, &mut matrix));
        filled?;
        records.extend(dummy);
        Ok(records)
    }

    /// The op that makes FP8 weights.
    fn quantized(&self) -> Result<Vec<OpRecord>> {
        let mut meta = Exec::meta()?;
        let [rows, columns] = self.matrix;
        let weight = meta.tensor("weight", &self.matrix, DType::Bf16)?;
        let mut codes = meta.tensor("codes", &self.matrix, DType::U8)?;
        let mut scales = meta.tensor("scales", &[rows.div_ceil(FP8_BLOCK), columns.div_ceil(FP8_BLOCK)], DType::F32)?;
        let (made, records) = meta.recording(|exec| ops::quantize_fp8(exec, &weight, &mut codes, &mut scales));
        made?;
        Ok(records)
    }
}
