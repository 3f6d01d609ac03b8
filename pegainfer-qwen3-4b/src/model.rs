//! Qwen3 as a model of the runtime: what it allocates, and its forward pass.

use crate::config::Config;
use crate::decode::{self, Cache};
use crate::weights::{self, Layer, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_kernels::ops::{self, Heads};
use pegainfer_kernels::runtime::{
    self, Bounds, ConfigError, ConfigFile, Inputs, LoadError, Model, ModelInfo, Parts, SampledRows, StepOf,
};

/// Dense Qwen3, 0.6B to 32B.
#[derive(Debug)]
pub struct Qwen3;

/// The Qwen3 engine.
pub type Engine = runtime::Engine<Qwen3>;

/// One step's work, as the scheduler hands it to the executor.
pub type Step = StepOf<Qwen3>;

type Pass<'a> = runtime::Pass<'a, Qwen3>;

impl Model for Qwen3 {
    const NAME: &'static str = "Qwen3";
    const ARCHITECTURE: &'static str = "Qwen3ForCausalLM";
    const MODEL_TYPE: &'static str = "qwen3";

    type Config = Config;
    type Weights = Weights;
    type Workspace = Workspace;
    type Cache = Cache;
    type State = ();

    fn config(file: ConfigFile) -> Result<Config, ConfigError> {
        Config::read(&file)
    }

    fn info(config: &Config) -> ModelInfo {
        ModelInfo {
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_position_embeddings,
            eos_token_ids: config.eos_token_ids.clone(),
            initializer_range: config.initializer_range,
            weight_bytes: weights::bytes(config),
            fp8_weights: config.quantization.is_some(),
            drafts: false,
            workspace_bytes_per_token: Workspace::bytes_per_token(config),
            kv_bytes_per_token: config.kv_bytes_per_token(),
            state_slot_bytes: None,
        }
    }

    fn weights(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
        weights::load(loader, config)
    }

    fn workspace(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<Workspace> {
        Workspace::new(exec, config, bounds.size)
    }

    fn cache(parts: Parts<'_, Self>, _bounds: &Bounds, blocks: usize) -> Result<Cache, LoadError> {
        let Parts { exec, config, weights, work } = parts;
        Cache::new(exec, config, weights, &work.rope, blocks)
    }

    fn state(_config: &Config, _bounds: &Bounds) {}

    fn begin(_exec: &mut Exec, work: &mut Workspace, step: &Step) -> Result<(), OpError> {
        work.set_rows(step.tokens.len());
        Ok(())
    }

    fn forward(pass: &mut Pass<'_>) -> Result<(), OpError> {
        let (weights, eps) = (pass.weights, pass.config.rms_norm_eps);
        let Pass { exec, config, cache, work, inputs, previous, step, .. } = pass;
        ops::embedding(exec, &inputs.tokens, previous, &weights.embedding, &mut work.activations.residual)?;
        if decode::supports(cache, step) {
            return decode::run(exec, (config, weights), cache, work, inputs, step);
        }
        let (residual, normed) = (&work.activations.residual, &mut work.activations.normed);
        ops::choose_format(exec, normed, &weights.layers[0].qkv)?;
        ops::rms_norm(exec, residual, &weights.layers[0].input_norm, eps, normed)?;
        for (i, layer) in weights.layers.iter().enumerate() {
            let next = weights.layers.get(i + 1);
            if next.is_some() {
                attention(pass, layer, i, true)?;
            } else if !last_attention(pass, layer, i)? {
                return Ok(());
            }
            // The MLP's end takes the next layer's input norm along.
            let norm = next.map_or(&weights.norm, |next| &next.input_norm);
            let Workspace { activations, attended, .. } = &mut *pass.work;
            let next = (norm, next.map(|next| &next.qkv));
            activations.finish_layer(pass.exec, (attended, &layer.o), &layer.mlp, next, eps)?;
        }
        Ok(())
    }

    fn output<'a>(work: &'a mut Workspace, weights: &'a Weights) -> (&'a mut Tensor, &'a Tensor) {
        (&mut work.activations.normed, weights.output())
    }
}

/// The first half of layer `i`, up to its output projection: `normed` becomes `attended`, if `rounds` in the format that the
/// projection takes, else in bf16.
fn attention(pass: &mut Pass<'_>, layer: &Layer, i: usize, rounds: bool) -> Result<(), OpError> {
    if pass.step.queries().1 > 1 {
        project(pass, layer, i)?;
        return attend(pass, layer, i, (false, rounds));
    }
    let Pass { exec, config, cache, work, inputs, step, .. } = pass;
    let Workspace { rope, activations, qkv, q, attended } = &mut **work;
    let heads = heads(config, layer, rope, inputs);
    ops::linear(exec, &activations.normed, &layer.qkv, qkv)?;
    let batch = inputs.attention(step);
    attended.set_dtype(DType::Bf16);
    if rounds {
        ops::choose_attended_format(exec, attended, &layer.o, (config.shape, config.kv_dtype), &batch, true)?;
    }
    ops::decode_attention(exec, qkv, &heads, &batch, cache.layers[i].both_mut(), q, attended)
}

/// As [`attention`] for the last layer, which goes on with the sampled rows only. Returns false if none is sampled.
fn last_attention(pass: &mut Pass<'_>, layer: &Layer, i: usize) -> Result<bool, OpError> {
    let rows = &pass.inputs.sample_rows;
    match SampledRows::of(pass.step, pass.inputs) {
        SampledRows::All => attention(pass, layer, i, true)?,
        SampledRows::None => {
            project(pass, layer, i)?;
            return Ok(false);
        }
        SampledRows::RowEnds => {
            project(pass, layer, i)?;
            pass.work.gather_queries(pass.exec, rows)?;
            attend(pass, layer, i, (true, true))?;
        }
        SampledRows::Some => {
            attention(pass, layer, i, false)?;
            pass.work.gather_outputs(pass.exec, rows)?;
        }
    }
    Ok(true)
}

/// The projections of layer `i`: `normed` becomes `q`, and keys and values in the cache.
fn project(pass: &mut Pass<'_>, layer: &Layer, i: usize) -> Result<(), OpError> {
    let Pass { exec, config, cache, work, inputs, .. } = pass;
    let Workspace { rope, activations, qkv, q, .. } = &mut **work;
    let heads = heads(config, layer, rope, inputs);
    ops::linear_qkv(exec, (&activations.normed, &layer.qkv), &heads, qkv, q, cache.layers[i].both_mut())
}

/// Attention of the queries of layer `i` over its cache: `q` becomes `attended`, of the sampled tokens or of all; `rounds` as in
/// [`attention`].
fn attend(pass: &mut Pass<'_>, layer: &Layer, i: usize, (sampled, rounds): (bool, bool)) -> Result<(), OpError> {
    let Pass { exec, config, cache, work, inputs, step, .. } = pass;
    let batch = if sampled { inputs.sampled_attention(step) } else { inputs.attention(step) };
    let (shape, kv) = (config.shape, &cache.layers[i]);
    let scale = (shape.head_dim as f32).sqrt().recip();
    work.attended.set_dtype(DType::Bf16);
    if rounds {
        ops::choose_attended_format(exec, &mut work.attended, &layer.o, (shape, config.kv_dtype), &batch, false)?;
    }
    ops::attention(exec, &work.q, (&kv.k, &kv.v), &batch, shape, scale, &mut work.attended)
}

/// The heads of a layer, for the tokens of a step.
fn heads<'a>(config: &Config, layer: &'a Layer, rope: &'a Tensor, inputs: &'a Inputs) -> Heads<'a> {
    let (shape, norms, eps) = (config.shape, layer.head_norms(), config.rms_norm_eps);
    Heads { shape, norms, eps, rope, positions: &inputs.positions, slots: &inputs.slots }
}
