//! The models whose ops are checked, and the steps that show them.

use crate::models::detect;
use anyhow::{Result, bail};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Exec;
use pegainfer_core::logits_processors::{LogitEdit, LogitsUpdate, TokenMask};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::SampleRow;
use pegainfer_core::tensor::DType;
use pegainfer_kernels::compare::Case;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_kernels::runtime::{self, Model as _};
use pegainfer_qwen3_4b::{self as qwen3, Qwen3};
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::{self as qwen35, Qwen35};
use std::path::Path;
use std::sync::Arc;

/// A model of a family that runs on a GPU.
pub struct Model {
    /// Heads of full attention.
    shape: HeadShape,
    rope_theta: f64,
    /// Rows and columns of a matrix of dummy weights.
    matrix: [usize; 2],
    /// The ops of a step of rows, tokens that each adds, and tokens of its context, see [`records`].
    records: Box<dyn Fn(usize, usize, usize) -> Result<Vec<OpRecord>>>,
}

/// Layers that are checked: the second one finds what the first one hands on.
const LAYERS: usize = 2;

/// Shapes that people use, each with as many layers as have ops of different shapes.
pub fn typical() -> impl Iterator<Item = (&'static str, Model)> {
    let models = [
        ("a model of Qwen3-4B's shape", Model::qwen3(qwen3_4b())),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-4B's shape", Model::qwen35(qwen35_4b())),
        #[cfg(feature = "deepseek-v4")]
        ("hyper-connections of DeepSeek-V4-Flash's shape", Model::hyper_connections(4096)),
        #[cfg(feature = "deepseek-v4")]
        ("hyper-connections of dsv4-tiny's shape", Model::hyper_connections(256)),
    ];
    models.into_iter()
}

impl Model {
    /// Of the checkpoint in `dir`.
    pub fn load(dir: &Path) -> Result<Self> {
        match detect::detect(dir)?.name {
            Qwen3::NAME => {
                let config = Qwen3::load_config(dir)?;
                Ok(Self::qwen3(qwen3::config::Config { layers: config.layers.min(LAYERS), ..config }))
            }
            #[cfg(feature = "qwen35")]
            Qwen35::NAME => Ok(Self::qwen35(Qwen35::load_config(dir)?)),
            #[cfg(feature = "deepseek-v4")]
            name if name == crate::models::engine::deepseek_v4::FAMILY.name => {
                let config = pegainfer_deepseek_v4::config::Config::load(dir)?;
                Ok(Self::hyper_connections(config.hidden_size))
            }
            name => bail!("{name} has no CUDA kernels yet: there is nothing to check"),
        }
    }

    fn qwen3(config: qwen3::config::Config) -> Self {
        let (shape, rope_theta) = (config.shape, config.rope_theta);
        let matrix = [config.hidden_size, config.intermediate_size];
        Self { shape, rope_theta, matrix, records: records::<Qwen3>(config) }
    }

    #[cfg(feature = "qwen35")]
    fn qwen35(config: qwen35::config::Config) -> Self {
        let (shape, rope_theta) = (config.shape, config.rope_theta);
        let matrix = [config.hidden_size, config.intermediate_size];
        Self { shape, rope_theta, matrix, records: records::<Qwen35>(config) }
    }

    /// What DeepSeek-V4 has CUDA kernels for: the mixing of streams of `hidden` elements.
    #[cfg(feature = "deepseek-v4")]
    fn hyper_connections(hidden: usize) -> Self {
        // No attention.
        let shape = HeadShape { heads: 1, kv_heads: 1, head_dim: 128 };
        let records = Box::new(move |batch, tokens, _| hyper_connections(batch * tokens, hidden));
        Self { shape, rope_theta: 1e4, matrix: [hidden, hidden], records }
    }

    /// What its calls do not say in shapes.
    pub fn case(&self, context: usize) -> Case {
        Case { shape: self.shape, context, rope_theta: self.rope_theta }
    }

    /// The ops of a step whose rows all have log-probabilities and logits updates, and the one that makes dummy weights.
    pub fn records(&self, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>> {
        let mut records = (self.records)(batch, tokens, context)?;
        let mut meta = Exec::meta()?;
        let mut matrix = meta.tensor("dummy weights", &self.matrix, DType::Bf16)?;
        let (filled, dummy) = meta.recording(|exec| ops::uniform(exec, 0, 0.0, &mut matrix));
        filled?;
        records.extend(dummy);
        Ok(records)
    }
}

/// Records steps of a model whose rows all have log-probabilities and a logits update.
fn records<M: runtime::Model>(config: M::Config) -> Box<dyn Fn(usize, usize, usize) -> Result<Vec<OpRecord>>> {
    Box::new(move |batch, tokens, context| {
        let mut step = runtime::uniform::<M>(batch, tokens, context);
        ask_for_all(&mut step.samples, M::info(&config).vocab_size);
        Ok(runtime::record_step::<M>(&config, &step)?)
    })
}

/// The mixing of a block's streams.
#[cfg(feature = "deepseek-v4")]
fn hyper_connections(tokens: usize, hidden: usize) -> Result<Vec<OpRecord>> {
    use ops::deepseek_v4::{HyperSpec, HyperWeights, hyper_mix};
    let mut meta = Exec::meta()?;
    let mut tensor = |name: &str, shape: &[usize], dtype| meta.tensor(name, shape, dtype);
    let streams = tensor("streams", &[tokens, 4, hidden], DType::Bf16)?;
    let weights = HyperWeights {
        function: tensor("function", &[24, 4 * hidden], DType::F32)?,
        base: tensor("base", &[24], DType::F32)?,
        scale: tensor("scale", &[3], DType::F32)?,
    };
    let mut mixed = tensor("mixed", &[tokens, hidden], DType::Bf16)?;
    let mut post = tensor("post", &[tokens, 4], DType::F32)?;
    let mut comb = tensor("comb", &[tokens, 4, 4], DType::F32)?;
    let spec = HyperSpec { iters: 20, eps: 1e-6, norm_eps: 1e-6 };
    let (done, records) =
        meta.recording(|exec| hyper_mix(exec, &streams, &weights, spec, &mut mixed, (&mut post, &mut comb)));
    done?;
    Ok(records)
}

/// Every row with log-probabilities and a logits update.
fn ask_for_all(samples: &mut [SampleRow], vocab: usize) {
    let edit = |token: usize| LogitEdit { token: token as u32, scale: 1.0, add: 0.0 };
    let edits: Vec<LogitEdit> = (0..vocab.min(1000)).map(edit).collect();
    let allowed = Some(Arc::new(TokenMask::new(&[0], vocab)));
    for row in samples {
        row.logprobs = Some(MAX_LOGPROBS);
        row.logits_update = Some(LogitsUpdate { edits: edits.clone(), allowed: allowed.clone() });
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
        delta: ops::DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_width: 4 },
        rms_norm_eps: 1e-6,
        rope_theta: 1e7,
        max_position_embeddings: 262_144,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}
