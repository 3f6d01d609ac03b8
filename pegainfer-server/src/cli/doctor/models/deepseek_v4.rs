//! DeepSeek-V4: the ops of its steps, and those that no step contains.

use super::model::{Model, StepShape};
use anyhow::Result;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::DType;
use pegainfer_deepseek_v4 as deepseek_v4;
use pegainfer_deepseek_v4::config::{Config, DSpark, Drafts, LayerKind, WINDOW, Yarn};
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_runtime::BlockShape;

/// Maximum number of checked routed experts: making the weights of 256 would take longer than comparing the ops.
const EXPERTS: usize = 16;

/// Maximum number of rows in a step for which the ops of verifying blocks of drafts are also checked.
const MAX_BLOCKS: usize = 16;

impl Model {
    /// DeepSeek-V4 with at most [`EXPERTS`] routed experts.
    pub(super) fn deepseek_v4(config: Config) -> Self {
        let config = Config { experts: config.experts.min(EXPERTS), ..config };
        // DeepSeek-V4 has no attention op of the Qwen models' shape.
        let shape = HeadShape { heads: 1, kv_heads: 1, head_dim: 128 };
        let matrix = [config.hidden_size, config.hidden_size];
        let rope_theta = config.rope_theta;
        let records = Box::new(move |batch, tokens, context| records(&config, (batch, tokens, context)));
        // Contexts with more entries than a token attends to.
        let more_steps = &[(1, 1, 20_000), (3, 1, 9000), (4, 40, 3000)];
        Self { shape, rope_theta, matrix, fp8: false, more_steps, records }
    }
}

/// The ops of a step, with activations in bf16 and in f32.
fn records(config: &Config, step: StepShape) -> Result<Vec<OpRecord>> {
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
        records.extend(copied_slot([step.0 + 1, WINDOW, config.head_dim], numerics.activations)?);
    }
    Ok(records)
}

/// The op that copies a prefix's state to a sequence; steps with sequences in their own slots do not contain it.
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

/// DeepSeek-V4-Flash with one layer of each kind.
pub(super) fn flash() -> Config {
    Config {
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
