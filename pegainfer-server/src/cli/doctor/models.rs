//! The models whose ops are checked, and the steps that contain them.

#[cfg(feature = "deepseek-v4")]
mod deepseek_v4;
pub mod groups;
mod shapes;
pub mod steps;

use anyhow::{Result, bail};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::tensor::DType;
use pegainfer_kernels::compare::Case;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_models::detect;
use pegainfer_qwen3_4b::{self as qwen3, Qwen3};
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::{self as qwen35, Qwen35};
use pegainfer_runtime::{Model as _, Quantization};
use shapes::qwen3_4b;
#[cfg(feature = "qwen35")]
use shapes::qwen35_4b;
use std::path::Path;
use steps::{StepRecords, both, records};

/// Rows of a step, new tokens per row, and context tokens.
pub type StepShape = (usize, usize, usize);

/// A model of a family that runs on a GPU.
pub struct Model {
    /// Heads of full attention.
    shape: HeadShape,
    rope_theta: f64,
    /// Rows and columns of a matrix of dummy weights.
    matrix: [usize; 2],
    /// True if only ops with FP8 weights are checked; all others are the same in bf16.
    fp8: bool,
    /// Steps to check in addition to those of every model.
    pub more_steps: &'static [StepShape],
    /// Records the ops of a step.
    records: StepRecords,
}

/// Number of checked layers: the second one receives the output of the first.
const LAYERS: usize = 2;

/// Steps whose number of tokens is not a multiple of four, to which FP8 by FP8 is padded.
const FP8_STEPS: [StepShape; 2] = [(1, 301, 301), (1, 130, 130)];
/// Edge of a block of FP8 weights.
const FP8_BLOCK: usize = 128;

/// Common shapes, each with as many layers as have ops of different shapes.
pub fn typical() -> impl Iterator<Item = (&'static str, Model)> {
    let models = [
        ("a model of Qwen3-4B's shape", Model::qwen3(qwen3_4b(), 1, false)),
        ("a model of Qwen3-4B's shape with FP8 weights", Model::qwen3(qwen3_4b(), 1, true)),
        ("a model of Qwen3-4B's shape with group-quantised weights", Model::qwen3_groups(qwen3_4b())),
        ("one of two ranks of Qwen3-4B", Model::qwen3(qwen3_4b(), 2, false)),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-4B's shape", Model::qwen35(qwen35_4b(), 1, false)),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-4B's shape with FP8 weights", Model::qwen35(qwen35_4b(), 1, true)),
        #[cfg(feature = "qwen35")]
        ("one of two ranks of Qwen3.5-4B", Model::qwen35(qwen35_4b(), 2, false)),
        #[cfg(feature = "deepseek-v4")]
        ("a model of DeepSeek-V4-Flash's shape", Model::deepseek_v4(deepseek_v4::flash())),
    ];
    models.into_iter()
}

impl Model {
    /// The model of the checkpoint in `dir`. Models that may have FP8 weights come twice, with a suffix for the name.
    pub fn load(dir: &Path) -> Result<Vec<(&'static str, Self)>> {
        let both = |model: &dyn Fn(bool) -> Self| vec![("", model(false)), (" with FP8 weights", model(true))];
        match detect::detect(dir)?.name {
            Qwen3::NAME => {
                let config = Qwen3::load_config(dir)?;
                let config = qwen3::config::Config { layers: config.layers.min(LAYERS), ..config };
                let mut models = both(&|fp8| Self::qwen3(config.clone(), 1, fp8));
                models.push((" with group-quantised weights", Self::qwen3_groups(config)));
                Ok(models)
            }
            #[cfg(feature = "qwen35")]
            Qwen35::NAME => {
                let config = Qwen35::load_config(dir)?;
                Ok(both(&|fp8| Self::qwen35(config.clone(), 1, fp8)))
            }
            #[cfg(feature = "deepseek-v4")]
            name if name == pegainfer_models::engine::deepseek_v4::FAMILY.name => {
                let config = pegainfer_deepseek_v4::config::Config::load(dir)?;
                Ok(vec![("", Self::deepseek_v4(config))])
            }
            name => bail!("{name} has no CUDA kernels yet: there is nothing to check"),
        }
    }

    fn qwen3(config: qwen3::config::Config, ranks: usize, fp8: bool) -> Self {
        let config = qwen3::config::Config { quantization: fp8.then(|| Quantization::every(&[])), ..config };
        let (heads, rope_theta) = (config.shape, config.rope.theta);
        let shape = HeadShape { heads: heads.heads / ranks, kv_heads: heads.kv_heads / ranks, ..heads };
        let matrix = [config.hidden_size, config.intermediate_size];
        let fp8_kv = qwen3::config::Config { kv_dtype: ops::KvDType::Fp8, ..config.clone() };
        let records = both(records::<Qwen3>(config, ranks), records::<Qwen3>(fp8_kv, ranks));
        Self { shape, rope_theta, matrix, fp8, more_steps: if fp8 { &FP8_STEPS } else { &[] }, records }
    }

    #[cfg(feature = "qwen35")]
    fn qwen35(config: qwen35::config::Config, ranks: usize, fp8: bool) -> Self {
        let quantization = fp8.then(|| Quantization::every(&qwen35::config::BF16_MODULES));
        let config = qwen35::config::Config { quantization, ..config };
        let (heads, rope_theta) = (config.shape, config.rope.theta);
        let shape = HeadShape { heads: heads.heads / ranks, kv_heads: heads.kv_heads / ranks, ..heads };
        let matrix = [config.hidden_size, config.intermediate_size];
        let fp8_kv = qwen35::config::Config { kv_dtype: ops::KvDType::Fp8, ..config.clone() };
        let records = both(records::<Qwen35>(config, ranks), records::<Qwen35>(fp8_kv, ranks));
        Self { shape, rope_theta, matrix, fp8, more_steps: if fp8 { &FP8_STEPS } else { &[] }, records }
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
            let weight = |record: &OpRecord| record.reads.get(1).is_some_and(|weight| weight.dtype == DType::U8);
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
