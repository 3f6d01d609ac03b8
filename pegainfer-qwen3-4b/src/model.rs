//! Qwen3 as a model of the runtime: allocations and forward pass.

use crate::config::Config;
use crate::decode::{self, Cache};
use crate::weights::{self, Weights};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_kernels::ops::{self, Matrix};
use pegainfer_runtime::{
    Activations, Adapters, Bounds, ConfigError, ConfigFile, DecoderWorkspace as Workspace, ExpertLayers, KeptTensors,
    LayerSources, LoadError, Model, ModelInfo, Parts, SampledRows, StepOf,
};

/// Qwen3, 0.6B to 32B, and its siblings with experts, 30B-A3B to 480B-A35B.
#[derive(Debug)]
pub struct Qwen3;

/// The Qwen3 engine.
pub type Qwen3Engine = pegainfer_runtime::ModelEngine<Qwen3>;

type Pass<'a> = pegainfer_runtime::Pass<'a, Qwen3>;

/// The work of one step, as the scheduler hands it to the executor.
pub type Step = StepOf<Qwen3>;

impl Model for Qwen3 {
    const NAME: &'static str = "Qwen3";
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Qwen3ForCausalLM", "qwen3"), ("Qwen3MoeForCausalLM", "qwen3_moe")];

    type Options = ();
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
            fp8_weights: config.quantization.is_some(),
            drafts: false,
            draft_block: None,
            image_token: None,
            max_default_tokens: usize::MAX,
        }
    }

    fn shard(config: &Config, shard: Shard) -> Result<Config, String> {
        config.shard(shard)
    }

    fn weights(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
        weights::load(loader, config)
    }

    fn adapted(config: &Config) -> Result<Vec<LayerSources>, String> {
        Ok((0..config.layers).map(|i| weights::sources(config, i)).collect())
    }

    fn workspace(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<Workspace> {
        Ok(Workspace::new(exec, &config.decoder(), bounds.size, [])?.0)
    }

    fn cache(parts: Parts<'_, Self>, _bounds: &Bounds, blocks: usize) -> Result<Cache, LoadError> {
        let Parts { exec, config, weights, work, .. } = parts;
        Cache::new(exec, config, weights, &work.attention.rope, blocks)
    }

    fn state(_config: &Config, _bounds: &Bounds) {}

    fn begin(pass: &mut Pass<'_>) -> Result<(), OpError> {
        pass.work.set_rows(pass.step.tokens.len());
        Ok(())
    }

    fn forward(pass: &mut Pass<'_>) -> Result<(), OpError> {
        let Pass { exec, config, weights, cache, work, inputs, previous, step, adapters, communicator, .. } = pass;
        let inputs = &**inputs;
        let (first, eps) = (&weights.layers[0], config.rms_norm_eps);
        ops::embedding(exec, &inputs.tokens, previous, &weights.embedding, &mut work.activations.residual)?;
        if adapters.is_none() && decode::supports(cache, step) {
            return decode::run(exec, (config, weights), cache, work, inputs, step);
        }
        let Activations { residual, normed, .. } = &mut work.activations;
        // Adapters read what the projection reads, in bf16.
        let reader = adapters.is_none().then_some(&first.attention.qkv);
        ops::rms_norm(exec, residual, &first.input_norm, eps, normed.input_of(reader))?;
        for (i, layer) in weights.layers.iter().enumerate() {
            let next = weights.layers.get(i + 1);
            // After the last layer's attention, nothing is wanted of tokens that are not sampled.
            let rows = if next.is_some() { SampledRows::All } else { SampledRows::of(step, inputs) };
            let mut adapters = Adapters::of_layer(adapters, i);
            let own = adapters.as_deref_mut();
            layer.attention.forward(exec, work, &mut cache.layers[i], (inputs, step), rows, own)?;
            if rows == SampledRows::None {
                return Ok(());
            }
            // The last op of the MLP also applies the next layer's input norm.
            let next = next.map_or((&weights.norm, None), |next| (&next.input_norm, Some(&next.attention.qkv)));
            let Workspace { activations, attention } = &mut **work;
            activations.finish_layer(
                exec,
                (&attention.attended, &layer.attention.o),
                &layer.mlp,
                next,
                eps,
                (*communicator, adapters),
            )?;
        }
        Ok(())
    }

    fn output<'a>(work: &'a mut Workspace, weights: &'a Weights) -> (&'a mut Tensor, &'a Matrix) {
        (work.activations.normed.bf16(), &weights.head)
    }

    fn kept_tensors(cache: &mut Cache) -> Option<KeptTensors<'_>> {
        let blocks = cache.layers.iter_mut().flat_map(|layer| <[&mut Tensor; 2]>::from(layer.both_mut())).collect();
        Some(KeptTensors { blocks, states: Vec::new() })
    }

    fn expert_layers(config: &Config) -> Option<ExpertLayers> {
        config.moe.map(|moe| moe.counted(config.sparse_number(config.layers - 1)))
    }

    fn chosen_experts(work: &mut Workspace, layer: usize, tokens: usize) -> Option<&Tensor> {
        Some(work.activations.mlp.chosen.of_layer(layer, tokens))
    }
}
