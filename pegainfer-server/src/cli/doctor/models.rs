//! The models whose ops are checked, and the steps that contain them.

use anyhow::{Result, bail};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Exec;
use pegainfer_core::logits_processors::{CountUpdate, CountedPenalties, LogitEdit, LogitsUpdate, Penalties, TokenMask};
use pegainfer_core::parallel::Shard;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::schedule;
use pegainfer_core::tensor::DType;
use pegainfer_core::weights::grouped::GroupFormat;
#[cfg(feature = "deepseek-v4")]
use pegainfer_deepseek_v4 as deepseek_v4;
use pegainfer_kernels::compare::Case;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_models::detect;
use pegainfer_qwen3_4b::{self as qwen3, Qwen3};
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::{self as qwen35, Qwen35};
use pegainfer_runtime::{Model as _, Quantization};
use std::path::Path;
use std::sync::Arc;

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
    /// Records the ops of a step, see [`records`].
    records: StepRecords,
}

/// Number of checked layers: the second one receives the output of the first.
const LAYERS: usize = 2;

/// Maximum number of checked routed experts: making the weights of 256 would take longer than comparing the ops.
#[cfg(feature = "deepseek-v4")]
const EXPERTS: usize = 16;

/// Formats of group-quantised weights: those that GPUs pack, and one for each meaning of codes and layout of scales.
const GROUP_FORMATS: [&str; 17] = [
    "int4 g128 f16 zero",
    "int4 g128 bf16",
    "int4 g256 f16",
    "int4 g32 bf16",
    "int4 g32 f16 zero",
    "int4 g32 f16 min",
    "int5 g32 f16",
    "int5 g32 f16 min",
    "int8 g32 f16",
    "iq4 g32 f16",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
    "nvfp4",
    "mxfp4",
    "fp8 g128 f32",
];

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
        ("a model of DeepSeek-V4-Flash's shape", Model::deepseek_v4(deepseek_v4_flash())),
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
                let config = deepseek_v4::config::Config::load(dir)?;
                let config = deepseek_v4::config::Config { experts: config.experts.min(EXPERTS), ..config };
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

    /// The GEMMs of the same model with weights of each group format that has a row's columns.
    fn qwen3_groups(config: qwen3::config::Config) -> Self {
        let columns = [config.hidden_size, config.shape.heads * config.shape.head_dim, config.intermediate_size];
        let fits = |format: &GroupFormat| columns.iter().all(|k| format.check(*k).is_ok());
        let of = |format| {
            let quantization = Some(Quantization::groups(format));
            records::<Qwen3>(qwen3::config::Config { quantization, ..config.clone() }, 1)
        };
        let formats = GROUP_FORMATS.iter().map(|name| name.parse::<GroupFormat>());
        let all: Vec<StepRecords> = formats.filter_map(Result::ok).filter(fits).map(of).collect();
        let is_grouped = |record: &OpRecord| record.reads.get(1).is_some_and(|weight| weight.dtype == DType::U8);
        let records = Box::new(move |batch, tokens, context| {
            let mut found = Vec::new();
            for records in &all {
                found.extend(records(batch, tokens, context)?.into_iter().filter(is_grouped));
            }
            Ok(found)
        });
        Self { records, ..Self::qwen3(config, 1, false) }
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

    #[cfg(feature = "deepseek-v4")]
    fn deepseek_v4(config: deepseek_v4::config::Config) -> Self {
        // DeepSeek-V4 has no attention op of the Qwen models' shape.
        let shape = HeadShape { heads: 1, kv_heads: 1, head_dim: 128 };
        let matrix = [config.hidden_size, config.hidden_size];
        let rope_theta = config.rope_theta;
        let records = Box::new(move |batch, tokens, context| deepseek_v4_records(&config, (batch, tokens, context)));
        // Contexts with more entries than a token attends to.
        let more_steps = &[(1, 1, 20_000), (3, 1, 9000), (4, 40, 3000)];
        Self { shape, rope_theta, matrix, fp8: false, more_steps, records }
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
}

/// Records the ops of a step with this number of rows, new tokens per row and context tokens.
type StepRecords = Box<dyn Fn(usize, usize, usize) -> Result<Vec<OpRecord>>>;

/// Records the ops of one model's step, then of the other's.
fn both(one: StepRecords, other: StepRecords) -> StepRecords {
    Box::new(move |batch, tokens, context| {
        let mut records = one(batch, tokens, context)?;
        records.extend(other(batch, tokens, context)?);
        Ok(records)
    })
}

impl Model {
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

/// Steps whose number of tokens is not a multiple of four, to which FP8 by FP8 is padded.
const FP8_STEPS: [StepShape; 2] = [(1, 301, 301), (1, 130, 130)];
/// Edge of a block of FP8 weights.
const FP8_BLOCK: usize = 128;

/// Records steps of rank 0 of `ranks` of a model whose rows all have log-probabilities and a logits update, without the
/// exchanges between ranks.
fn records<M: pegainfer_runtime::Model>(config: M::Config, ranks: usize) -> StepRecords {
    Box::new(move |batch, tokens, context| {
        let mut step = pegainfer_runtime::uniform::<M>(batch, tokens, context);
        ask_for_all(&mut step, M::info(&config).vocab_size);
        let mut records = pegainfer_runtime::record_step::<M>(&config, ranks, &step)?;
        records.retain(|record| record.sent == 0);
        Ok(records)
    })
}

/// Maximum number of rows in a step for which the ops of verifying blocks of drafts are also checked.
#[cfg(feature = "deepseek-v4")]
const MAX_BLOCKS: usize = 16;

/// The ops of a step, with activations in bf16 and in f32.
#[cfg(feature = "deepseek-v4")]
fn deepseek_v4_records(config: &deepseek_v4::config::Config, step: (usize, usize, usize)) -> Result<Vec<OpRecord>> {
    use deepseek_v4::numerics::Numerics;
    let mut records = Vec::new();
    for numerics in [Numerics::REFERENCE, Numerics::F32] {
        records.extend(deepseek_v4::record(config, numerics, 1, step)?);
        // With several ranks, a block's output is an f32 sum.
        let shared = deepseek_v4::record(config, numerics, 2, step)?;
        records.extend(shared.into_iter().filter(|record| record.op.starts_with("hyper_merge")));
        if config.loaded_dspark().is_some() && step.1 == 1 && step.0 <= MAX_BLOCKS {
            records.extend(deepseek_v4::record_blocks(config, numerics, 1, (step.0, step.2))?);
        }
        records.extend(dummy_weights()?);
        records.extend(copied_slot([step.0 + 1, deepseek_v4::config::WINDOW, config.head_dim], numerics.activations)?);
    }
    Ok(records)
}

/// The op that copies a prefix's state to a sequence; steps with sequences in their own slots do not contain it.
#[cfg(feature = "deepseek-v4")]
fn copied_slot(shape: [usize; 3], activations: DType) -> Result<Vec<OpRecord>> {
    let mut meta = Exec::meta()?;
    let [slots, ring, width] = shape;
    let mut rings = [
        meta.tensor("window", &shape, activations)?,
        meta.tensor("partial.values", &[slots, ring, width], DType::F32)?,
        meta.tensor("partial.scores", &[slots, 2 * ring, 2 * width], DType::F32)?,
    ];
    let table = ops::deepseek_v4::RingTable::new(&mut meta, &[])?;
    let (copied, records) = meta
        .recording(|exec| ops::deepseek_v4::copy_slots(exec, &table, &mut rings.iter_mut().collect::<Vec<_>>(), 0, 1));
    copied?;
    Ok(records)
}

/// The ops that make dummy weights.
#[cfg(feature = "deepseek-v4")]
fn dummy_weights() -> Result<Vec<OpRecord>> {
    use ops::deepseek_v4::{Place, random_codes, random_numbers};
    let (mut meta, place) = (Exec::meta()?, Place { whole: 999, first_row: 0, first_column: 0 });
    let mut records = Vec::new();
    for dtype in [DType::U8, DType::Bf16, DType::F32] {
        let mut out = meta.tensor("dummy weights", &[77, 999], dtype)?;
        let (made, of_dtype) = meta.recording(|exec| match dtype {
            DType::U8 => random_codes(exec, 0, place, (0, 0), &mut out),
            _ => random_numbers(exec, 0, place, 0.0, &mut out),
        });
        made?;
        records.extend(of_dtype);
    }
    Ok(records)
}

/// Requests log-probabilities and all logits processors for every row.
fn ask_for_all<R>(step: &mut schedule::Step<R>, vocab: usize) {
    let edit = |token: usize| LogitEdit { token: token as u32, scale: 1.0, add: 0.0 };
    let edits: Vec<LogitEdit> = (0..vocab.min(1000)).map(edit).collect();
    let allowed = Some(Arc::new(TokenMask::new(&[0], vocab)));
    let penalties = Penalties { presence: 1.5, frequency: 0.5, repetition: 1.1 };
    for (row, slot) in step.samples.iter_mut().zip(0..) {
        row.logprobs = Some(MAX_LOGPROBS);
        let penalties = Some(CountedPenalties { penalties, slot, drafts: vec![0, 1, 0] });
        row.logits_update = Some(LogitsUpdate { penalties, edits: edits.clone(), allowed: allowed.clone() });
        step.counts.push(CountUpdate { slot, starts: true, prompt: [0; 500].into(), generated: vec![0; 500] });
    }
}

fn qwen3_4b() -> qwen3::config::Config {
    qwen3::config::Config {
        vocab_size: 151_936,
        hidden_size: 2560,
        intermediate_size: 9728,
        moe: None,
        dense_layers: Vec::new(),
        layers: LAYERS,
        shape: HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
        all_heads: HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
        shard: Shard::WHOLE,
        rms_norm_eps: 1e-6,
        rope: 1e6.into(),
        max_position_embeddings: 40_960,
        tie_word_embeddings: true,
        quantization: None,
        kv_dtype: ops::KvDType::Bf16,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}

#[cfg(feature = "qwen35")]
fn qwen35_4b() -> qwen35::config::Config {
    use qwen35::config::LayerKind;
    qwen35::config::Config {
        gguf: false,
        vocab_size: 248_320,
        hidden_size: 2560,
        intermediate_size: 9216,
        moe: None,
        layers: vec![LayerKind::Linear, LayerKind::Full],
        shape: HeadShape { heads: 16, kv_heads: 4, head_dim: 256 },
        all_heads: HeadShape { heads: 16, kv_heads: 4, head_dim: 256 },
        shard: Shard::WHOLE,
        rotary_dim: 64,
        delta: ops::DeltaShape {
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 128,
            conv_width: 4,
            tiled_output: false,
        },
        rms_norm_eps: 1e-6,
        rope: 1e7.into(),
        max_position_embeddings: 262_144,
        tie_word_embeddings: true,
        mtp: false,
        quantization: None,
        kv_dtype: ops::KvDType::Bf16,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}

#[cfg(feature = "deepseek-v4")]
fn deepseek_v4_flash() -> deepseek_v4::config::Config {
    use deepseek_v4::config::{DSpark, Drafts, LayerKind, Yarn};
    use pegainfer_runtime::BlockShape;
    deepseek_v4::config::Config {
        vocab_size: 129_280,
        hidden_size: 4096,
        layers: vec![LayerKind::Sparse, LayerKind::Heavy],
        drafts: Drafts::DSpark(DSpark {
            layers: 1,
            targets: vec![0, 1],
            markov_rank: 256,
            block: BlockShape { tokens: 5, noise_token: 128_799 },
        }),
        // Rings longer than the window.
        loads_drafts: true,
        heads: 64,
        head_dim: 512,
        rope_dim: 64,
        q_lora_rank: 1024,
        o_groups: 8,
        o_lora_rank: 1024,
        index_heads: 64,
        index_head_dim: 128,
        index_topk: 512,
        hash_layers: 1,
        experts: EXPERTS,
        experts_per_token: 6,
        expert_width: 2048,
        routed_scaling: 1.5,
        swiglu_limit: 10.0,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        compress_rope_theta: 1.6e5,
        yarn: Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_context: 65_536.0 },
        max_position_embeddings: 1_048_576,
        quantized: true,
        initializer_range: 0.02,
        eos_token_ids: vec![1],
    }
}
