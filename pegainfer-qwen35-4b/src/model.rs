//! Qwen3.5 as a model of the runtime: allocations and forward pass.

use crate::config::Config;
use crate::mtp;
use crate::pass::{Pass, Qwen35};
use crate::plan::{self, Segment, Step};
use crate::state::{self, LayerState};
use crate::weights::{self, LinearAttention, Mixer, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::schedule::{StateConfig, StateSlots};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_kernels::ops::{self, BLOCK_SIZE, DeltaInputs, DeltaWeights, Matrix};
use pegainfer_runtime::{
    Activations, Adapters, Bounds, ConfigError, ConfigFile, DecoderWorkspace, ExpertLayers, KeptTensors, LayerSources,
    LoadError, Model, ModelInfo, Parts, Projection, SampledRows, adapted_linear,
};

/// The Qwen3.5 engine.
pub type Qwen35Engine = pegainfer_runtime::ModelEngine<Qwen35>;

impl Model for Qwen35 {
    const NAME: &'static str = "Qwen3.5";
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[
        ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    ];
    const DRAFTS: bool = true;

    type Options = ();
    type Config = Config;
    type Weights = Weights;
    type Workspace = Workspace;
    type Cache = Vec<LayerState>;
    type State = StateSlots;

    fn config(file: ConfigFile) -> Result<Config, ConfigError> {
        Config::read(&file.with_section("text_config"))
    }

    fn info(config: &Config) -> ModelInfo {
        ModelInfo {
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_position_embeddings,
            eos_token_ids: config.eos_token_ids.clone(),
            initializer_range: config.initializer_range,
            fp8_weights: config.quantization.is_some(),
            drafts: config.mtp,
            draft_block: None,
            image_token: config.vision.map(|vision| vision.image_token),
            max_default_tokens: usize::MAX,
        }
    }

    fn skipped(name: &str) -> Option<&'static str> {
        weights::skipped(name)
    }

    fn shard(config: &Config, shard: Shard) -> Result<Config, String> {
        config.shard(shard)
    }

    fn weights(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
        weights::load(loader, config)
    }

    fn adapted(config: &Config) -> Result<Vec<LayerSources>, String> {
        weights::sources(config)
    }

    fn workspace(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<Workspace> {
        Workspace::new(exec, config, bounds)
    }

    fn cache(parts: Parts<'_, Self>, bounds: &Bounds, blocks: usize) -> Result<Vec<LayerState>, LoadError> {
        state::allocate(parts.exec, parts.config, blocks, bounds.slots).map_err(LoadError::State)
    }

    fn state(_config: &Config, bounds: &Bounds) -> StateSlots {
        StateSlots::new(StateConfig {
            sequences: bounds.size.rows,
            snapshots: bounds.snapshots(),
            interval: if bounds.snapshots() > 0 { bounds.snapshot_interval } else { 0 },
            block_tokens: BLOCK_SIZE,
            within_chunks: true,
        })
    }

    fn add_state_rows(step: &mut Step, first: usize) {
        step.add_segments(first);
    }

    fn begin(pass: &mut Pass<'_>) -> Result<(), OpError> {
        let Pass { exec, weights, work, step, .. } = pass;
        let words: Vec<u32> = step.state.iter().flat_map(Segment::words).collect();
        exec.fill_rows(&mut work.segments, &words)?;
        work.set_rows(step.tokens.len());
        if step.images.is_empty() && step.encode.is_none() {
            return Ok(());
        }
        let (Some(images), Some(weights)) = (&mut work.images, &weights.vision) else {
            return Err(OpError { op: "vision", message: "the vision tower is not loaded".to_owned() });
        };
        if let Some(part) = &step.encode {
            images.encode_part(exec, weights, part)?;
        }
        if step.images.is_empty() { Ok(()) } else { images.prepare(exec, weights, &step.images) }
    }

    fn forward(pass: &mut Pass<'_>) -> Result<(), OpError> {
        let Pass { exec, config, weights, cache, work, inputs, previous, step, adapters, communicator, .. } = pass;
        let inputs = &**inputs;
        let (weights, eps) = (&weights.decoder, config.rms_norm_eps);
        let Activations { residual, normed, .. } = &mut work.decoder.activations;
        ops::embedding(exec, &inputs.tokens, previous, &weights.embedding, residual)?;
        if let Some(images) = work.images.as_ref().filter(|_| !step.images.is_empty()) {
            images.replace(exec, &step.images, residual)?;
        }
        let first = &weights.layers[0];
        // Adapters read what the projection reads, in bf16.
        let reader = adapters.is_none().then(|| first.projection());
        ops::rms_norm(exec, residual, &first.input_norm, eps, normed.input_of(reader))?;
        for (i, (layer, state)) in weights.layers.iter().zip(cache.iter_mut()).enumerate() {
            let next = weights.layers.get(i + 1);
            // After the last layer's attention, nothing is wanted of tokens that are not sampled, unless their output
            // is drafted from.
            let rows = if next.is_some() || config.mtp { SampledRows::All } else { SampledRows::of(step, inputs) };
            let mut adapters = Adapters::of_layer(adapters, i);
            let own = adapters.as_deref_mut();
            match &layer.mixer {
                Mixer::Linear(mixer) => linear_attention(exec, config, mixer, work, state, step, own)?,
                Mixer::Full(mixer) => mixer.forward(exec, &mut work.decoder, state.kv(), (inputs, step), rows, own)?,
            }
            if rows == SampledRows::None {
                return Ok(());
            }
            // The last op of the MLP also applies the next layer's input norm.
            let next = next.map_or((&weights.norm, None), |next| (&next.input_norm, Some(next.projection())));
            let Workspace { decoder: DecoderWorkspace { activations, attention }, gated, .. } = &mut **work;
            let mixed: (&Tensor, &Matrix) = match &layer.mixer {
                Mixer::Linear(mixer) => (gated, &mixer.out),
                Mixer::Full(mixer) => (&attention.attended, &mixer.o),
            };
            activations.finish_layer(exec, mixed, &layer.mlp, next, eps, (*communicator, adapters))?;
        }
        if config.mtp { mtp::gather_sampled(pass) } else { Ok(()) }
    }

    fn output<'a>(work: &'a mut Workspace, weights: &'a Weights) -> (&'a mut Tensor, &'a Matrix) {
        let Workspace { decoder, sampled, .. } = work;
        (sampled.as_mut().unwrap_or(decoder.activations.normed.bf16()), &weights.decoder.head)
    }

    fn kept_tensors(cache: &mut Vec<LayerState>) -> Option<KeptTensors<'_>> {
        let mut kept = KeptTensors::default();
        for layer in cache {
            match layer {
                LayerState::Full(kv) => kept.blocks.extend(<[&mut Tensor; 2]>::from(kv.both_mut())),
                LayerState::Linear { states, conv } => kept.states.extend([states, conv]),
            }
        }
        Some(kept)
    }

    fn expert_layers(config: &Config) -> Option<ExpertLayers> {
        config.moe.map(|moe| moe.counted(Some(config.layers.len() - 1)))
    }

    fn chosen_experts(work: &mut Workspace, layer: usize, tokens: usize) -> Option<&Tensor> {
        Some(work.decoder.activations.mlp.chosen.of_layer(layer, tokens))
    }

    fn begin_draft(pass: &mut Pass<'_>) -> Result<(), OpError> {
        pass.work.set_rows(pass.step.tokens.len());
        Ok(())
    }

    fn draft(pass: &mut Pass<'_>) -> Result<(), OpError> {
        mtp::draft(pass)
    }

    fn draft_output<'a>(work: &'a mut Workspace, weights: &'a Weights) -> (&'a mut Tensor, &'a Matrix) {
        (work.decoder.activations.normed.bf16(), &weights.decoder.head)
    }
}

/// A layer of the gated delta rule up to its output projection: `normed` becomes `gated`.
fn linear_attention(
    exec: &mut Exec,
    config: &Config,
    layer: &LinearAttention,
    work: &mut Workspace,
    state: &mut LayerState,
    step: &Step,
    adapters: Option<&mut Adapters<'_>>,
) -> Result<(), OpError> {
    let (shape, eps, (states, conv)) = (config.delta, config.rms_norm_eps, state.recurrent());
    let Workspace { decoder, segments, projected, mixed, chunks, read, gated, .. } = work;
    let weights = DeltaWeights { conv: &layer.conv, a_log: &layer.a_log, dt_bias: &layer.dt_bias, norm: &layer.norm };
    let (out, normed) = (gated.input_of(adapters.is_none().then_some(&layer.out)), &decoder.activations.normed);
    adapted_linear(exec, (normed, &layer.projection), Projection::Input, adapters, projected)?;
    if step.queries().1 == 1 {
        let (slots, scratch) = ((states, conv), (mixed, read));
        return ops::decode_delta(exec, projected, &weights, segments, shape, eps, slots, scratch, out);
    }
    ops::causal_conv1d(exec, projected, weights.conv, segments, shape, conv, mixed)?;
    let inputs = DeltaInputs { mixed, projected, a_log: weights.a_log, dt_bias: weights.dt_bias, segments };
    if plan::runs_in_chunks(exec.device()) {
        ops::gated_delta_chunks(exec, &inputs, shape, states, chunks, read)?;
    } else {
        ops::gated_delta_rule(exec, &inputs, shape, states, read)?;
    }
    ops::gated_rms_norm(exec, read, projected, weights.norm, shape, eps, out)
}
