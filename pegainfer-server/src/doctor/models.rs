//! The models whose ops are checked, and the steps that show them.

use crate::detect::{self, Family};
use anyhow::{Result, bail};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::rules::{Adjustment, LogitEdit, TokenMask};
use pegainfer_core::schedule::SampleRow;
use pegainfer_core::tensor::DType;
use pegainfer_kernels::compare::Case;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_qwen3_4b as qwen3;
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b as qwen35;
use std::path::Path;
use std::sync::Arc;

/// A model of a family that runs on a GPU.
pub enum Model {
    Qwen3(qwen3::config::Config),
    #[cfg(feature = "qwen35")]
    Qwen35(qwen35::config::Config),
}

/// Layers that are checked: the second one finds what the first one hands on.
const LAYERS: usize = 2;

/// Shapes that people use, each with as many layers as have ops of different shapes.
pub fn typical() -> impl Iterator<Item = (&'static str, Model)> {
    let models = [
        ("a model of Qwen3-4B's shape", Model::Qwen3(qwen3_4b())),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-4B's shape", Model::Qwen35(qwen35_4b())),
    ];
    models.into_iter()
}

impl Model {
    /// Of the checkpoint in `dir`.
    pub fn load(dir: &Path) -> Result<Self> {
        match detect::detect(dir)? {
            Family::Qwen3 => {
                let config = qwen3::config::Config::load(dir)?;
                Ok(Self::Qwen3(qwen3::config::Config { layers: config.layers.min(LAYERS), ..config }))
            }
            #[cfg(feature = "qwen35")]
            Family::Qwen35 => Ok(Self::Qwen35(qwen35::config::Config::load(dir)?)),
            #[cfg(feature = "deepseek-v4")]
            family => bail!("{family} has no CUDA kernels yet: there is nothing to check"),
        }
    }

    /// What its calls do not say in shapes.
    pub fn case(&self, context: usize) -> Case {
        match self {
            Self::Qwen3(config) => Case { shape: config.shape, context, rope_theta: config.rope_theta },
            #[cfg(feature = "qwen35")]
            Self::Qwen35(config) => Case { shape: config.shape, context, rope_theta: config.rope_theta },
        }
    }

    /// The ops of a step whose rows all want log-probabilities and have rules, and the one that makes dummy weights.
    pub fn records(&self, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>> {
        let (mut records, matrix) = match self {
            Self::Qwen3(config) => {
                let mut step = qwen3::plan::uniform(batch, tokens, context);
                ask_for_all(&mut step.samples, config.vocab_size);
                (qwen3::record_step(config, &step)?, [config.hidden_size, config.intermediate_size])
            }
            #[cfg(feature = "qwen35")]
            Self::Qwen35(config) => {
                let mut step = qwen35::plan::uniform(batch, tokens, context);
                ask_for_all(&mut step.samples, config.vocab_size);
                (qwen35::record_step(config, &step)?, [config.hidden_size, config.intermediate_size])
            }
        };
        let mut meta = Exec::meta()?;
        let mut matrix = meta.tensor("dummy weights", &matrix, DType::Bf16)?;
        let (filled, dummy) = meta.recording(|exec| ops::uniform(exec, 0, 0.0, &mut matrix));
        filled?;
        records.extend(dummy);
        Ok(records)
    }
}

/// Every row with log-probabilities and rules.
fn ask_for_all(samples: &mut [SampleRow], vocab: usize) {
    let edit = |token: usize| LogitEdit { token: token as u32, scale: 1.0, add: 0.0 };
    let edits: Vec<LogitEdit> = (0..vocab.min(1000)).map(edit).collect();
    let allowed = Some(Arc::new(TokenMask::new(&[0], vocab)));
    for row in samples {
        row.logprobs = Some(MAX_LOGPROBS);
        row.adjustment = Some(Adjustment { edits: edits.clone(), allowed: allowed.clone() });
    }
}

fn qwen3_4b() -> qwen3::config::Config {
    qwen3::config::Config {
        vocab_size: 151_936,
        hidden_size: 2560,
        intermediate_size: 9728,
        layers: LAYERS,
        shape: HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        max_position_embeddings: 40_960,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}

#[cfg(feature = "qwen35")]
fn qwen35_4b() -> qwen35::config::Config {
    use qwen35::config::LayerKind;
    qwen35::config::Config {
        vocab_size: 248_320,
        hidden_size: 2560,
        intermediate_size: 9216,
        layers: vec![LayerKind::Linear, LayerKind::Full],
        shape: HeadShape { heads: 16, kv_heads: 4, head_dim: 256 },
        rotary_dim: 64,
        delta: ops::DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4 },
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_position_embeddings: 262_144,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}
