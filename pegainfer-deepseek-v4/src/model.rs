//! DeepSeek-V4 as a model of the runtime.

use crate::config::Config;
use crate::draft_method::{check_tensors, with_drafts};
use crate::forward::{self, add_transition};
use crate::plan::{NO_STATE, PAGE_TOKENS, Segment, Step};
use crate::rank_config::{DeepSeekV4, Options, RankConfig};
use crate::shard;
use crate::state::{self, Cache};
use crate::weights::{self, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::Shard;
use pegainfer_core::schedule::{StateConfig, StateSlots};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Checkpoint, Loader, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{SIDE_STREAMS, matmul, plan_gemms};
use pegainfer_kernels::sources::Family;
use pegainfer_runtime::{
    Bounds, ConfigError, ConfigFile, ExpertLayers, KeptTensors, LoadError, LoadOptions, Model, ModelInfo, Parts, Pass,
    PassKind,
};

/// The DeepSeek-V4 engine.
pub type DeepSeekEngine = pegainfer_runtime::ModelEngine<DeepSeekV4>;

/// Limit of the default token budget of a step, which takes about three times as long on a GPU as one of 1,024 tokens.
const MAX_DEFAULT_TOKENS: usize = 4096;
/// Tokens of the first step of a longer warm-up. It also loads the kernels of shorter steps.
const MIN_WARM_UP: usize = 256;
/// Tokens of the largest step of the warm-up.
const MAX_WARM_UP: usize = 4096;

impl Model for DeepSeekV4 {
    const NAME: &'static str = "DeepSeek-V4";
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("DeepseekV4ForCausalLM", "deepseek_v4")];
    const DRAFTS: bool = true;
    const FAMILY: Family = Family::DeepSeekV4;
    const BLOCK_TOKENS: usize = PAGE_TOKENS;
    const SHAPED_GRAPHS: bool = true;

    type Options = Options;
    type Config = RankConfig;
    type Weights = Weights;
    type Workspace = Workspace;
    type Cache = Cache;
    type State = StateSlots;

    fn config(file: ConfigFile) -> Result<RankConfig, ConfigError> {
        file.refuse_overrides()?;
        Ok(RankConfig::new(Config::read(&file)?, Options::default()))
    }

    fn load_config_for(options: &LoadOptions<Options>) -> Result<RankConfig, LoadError> {
        let model = Self::load_config_with(&options.model_path, &options.overrides)?.model;
        let model = with_drafts(model, options.speculation.as_ref(), options.max_num_batched_tokens)?;
        Ok(RankConfig::new(model, options.model))
    }

    fn info(RankConfig { model, .. }: &RankConfig) -> ModelInfo {
        ModelInfo {
            vocab_size: model.vocab_size,
            max_position_embeddings: model.max_position_embeddings,
            eos_token_ids: model.eos_token_ids.clone(),
            initializer_range: model.initializer_range,
            fp8_weights: model.quantized,
            drafts: model.loads_drafts,
            draft_block: model.loaded_dspark().map(|dspark| dspark.block),
            image_token: None,
            max_default_tokens: MAX_DEFAULT_TOKENS,
        }
    }

    fn shard(config: &RankConfig, shard: Shard) -> Result<RankConfig, String> {
        shard::check(&config.model, shard.ranks)?;
        Ok(RankConfig { shard, ..config.clone() })
    }

    fn check_checkpoint(config: &RankConfig, checkpoint: &Checkpoint) -> Result<(), LoadError> {
        check_tensors(&config.model, checkpoint)
    }

    fn skipped(name: &str) -> Option<&'static str> {
        name.starts_with("mtp.").then_some("the layers that draft")
    }

    fn weights(loader: &mut Loader<'_>, config: &RankConfig) -> Result<Weights, WeightsError> {
        weights::load(loader, &config.model, config.shard)
    }

    fn finish_weights(exec: &mut Exec, weights: &mut Weights, config: &RankConfig) -> Result<(), LoadError> {
        exec.open_side_streams(SIDE_STREAMS)?;
        Ok(weights.widen(exec, config.options.numerics.activations)?)
    }

    fn workspace(exec: &mut Exec, config: &RankConfig, bounds: &Bounds) -> std::io::Result<Workspace> {
        Workspace::new(exec, config, bounds)
    }

    fn cache(parts: Parts<'_, Self>, bounds: &Bounds, blocks: usize) -> Result<Cache, LoadError> {
        Cache::new(parts.exec, parts.config, bounds, blocks)
    }

    fn kept_tensors(cache: &mut Cache) -> Option<KeptTensors<'_>> {
        Some(cache.kept_tensors())
    }

    fn state(_config: &RankConfig, bounds: &Bounds) -> StateSlots {
        StateSlots::new(StateConfig {
            sequences: bounds.size.rows,
            snapshots: bounds.snapshots(),
            interval: if bounds.snapshots() > 0 { PAGE_TOKENS } else { 0 },
            block_tokens: PAGE_TOKENS,
            // The ops update a slot in place.
            within_chunks: false,
        })
    }

    fn add_state_rows(step: &mut Step, first: usize) {
        step.add_segments(first);
    }

    fn add_draft_rows(pass: &mut Step, step: &Step, rows: &[usize]) {
        let ends = pass.qo_indptr.windows(2).zip(&pass.kv_lens);
        let segment = |(row, (ends, context)): (&usize, (&[u32], &u32))| {
            let slot = if *context == 0 { NO_STATE } else { step.state[*row].to };
            Segment { first: ends[0], end: ends[1], from: slot, to: slot }
        };
        pass.state = rows.iter().zip(ends).map(segment).collect();
    }

    /// Also moves the state of rows that change their slot, before any layer runs.
    fn begin(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        let Pass { exec, cache, work, step, .. } = pass;
        cache.fill_slots(exec, step)?;
        work.set_rows(step.tokens.len());
        state::copy_slots(exec, &mut cache.layers, &cache.rings, step)
    }

    fn forward(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        let (mut pass, state, drafts) = forward::Pass::of(pass);
        pass.run(state, drafts)
    }

    fn output<'a>(work: &'a mut Workspace, weights: &'a Weights) -> (&'a mut Tensor, &'a Matrix) {
        (&mut work.last_normed, &weights.head)
    }

    /// Layers that draft overwrite the choices of the last layer.
    fn expert_layers(RankConfig { model, .. }: &RankConfig) -> Option<ExpertLayers> {
        let (layers, per_token) = (model.layers.len() - 1, model.experts_per_token);
        Some(ExpertLayers { layers, experts: model.experts, per_token })
    }

    fn chosen_experts(work: &mut Workspace, layer: usize, tokens: usize) -> Option<&Tensor> {
        Some(work.experts.of_layer(layer, tokens))
    }

    fn project(exec: &mut Exec, normed: &Tensor, head: &Matrix, logits: &mut Tensor) -> Result<(), OpError> {
        matmul(exec, normed, head, logits)
    }

    fn begin_draft(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        let Pass { exec, cache, work, step, kind, .. } = pass;
        cache.fill_slots(exec, step)?;
        work.set_rows(step.tokens.len());
        match (kind, &mut work.dspark) {
            (PassKind::Blocks, Some(dspark)) => dspark.fill(exec, step, cache.draft_ring()),
            _ => Ok(()),
        }
    }

    fn draft(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        let kind = pass.kind;
        let (mut pass, _, drafts) = forward::Pass::of(pass);
        match kind {
            PassKind::Blocks => pass.draft_blocks(drafts),
            kind => pass.draft(drafts, kind == PassKind::Drafts { again: true }),
        }
    }

    fn add_transition(
        exec: &mut Exec,
        (work, weights): (&mut Workspace, &Weights),
        previous: Option<&Tensor>,
        logits: &mut Tensor,
    ) -> Result<(), OpError> {
        add_transition(exec, (work, weights), previous, logits)
    }

    /// Prompts of 256, 512, … and up to 4,096 tokens, through the first layers that contain every kind of layer.
    fn warm_up(
        exec: &mut Exec,
        bounds: &Bounds,
        (_, tokens): (usize, usize),
        _mixed_tokens: usize,
    ) -> Result<Vec<Vec<(usize, usize)>>, OpError> {
        let tokens = tokens.min(MAX_WARM_UP);
        // A step of few tokens could become a CUDA graph of the first layers.
        if exec.device() != Device::Cuda || tokens <= 1 + bounds.drafts {
            return Ok(Vec::new());
        }
        let sizes = std::iter::successors(Some(MIN_WARM_UP), |tokens| Some(2 * tokens)).take_while(|n| *n < tokens);
        Ok(sizes.chain([tokens]).map(|n| vec![(n, n)]).collect())
    }

    fn begin_warm_up(config: &mut RankConfig) {
        config.layers = distinct_layers(&config.model);
    }

    fn end_warm_up(exec: &mut Exec, config: &mut RankConfig, tokens: usize) -> Result<(), OpError> {
        config.layers = config.model.layers.len();
        plan_gemms(exec, tokens.min(MAX_WARM_UP));
        Ok(())
    }

    /// The state of each layer in the slots of the step's rows and in their newest pages. The last state is that of the
    /// layer that drafts, if it is loaded, before its passes after the step.
    fn hashes(pass: &mut Pass<'_, Self>) -> Result<Vec<(String, u64)>, OpError> {
        let layers = pass.cache.layers.iter().enumerate();
        layers.map(|(i, layer)| Ok((format!("the state of layer {i}"), layer.hash(pass.exec, pass.step)?))).collect()
    }
}

/// Number of first layers that contain every kind of attention and of router of the model.
fn distinct_layers(config: &Config) -> usize {
    let kind = |i: usize| (config.layers[i], i < config.hash_layers);
    let is_new = |i: &usize| !(0..*i).any(|before| kind(before) == kind(*i));
    (0..config.layers.len()).rfind(is_new).map_or(0, |i| i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::weight_bytes;
    use crate::testing::flash;
    use pegainfer_core::parallel::fewest_ranks;
    use pegainfer_runtime::{GpuFit, ModelBytes, Overrides, rank_bytes};

    fn options() -> LoadOptions<Options> {
        LoadOptions {
            model_path: std::path::PathBuf::new(),
            overrides: Overrides::default(),
            model: Options::default(),
            dummy_seed: None,
            max_model_len: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            max_num_mixed_tokens: 512,
            kv_cache_bytes: None,
            gpu_memory_utilization: 0.9,
            gpu_memory_limit: None,
            loop_back_ranks: None,
            check_ranks: false,
            state_cache_bytes: None,
            state_cache_interval: PAGE_TOKENS,
            kv_offloading_bytes: None,
            kv_disk: None,
            cuda_graph: true,
            lora: None,
            speculation: None,
        }
    }

    fn rank(shard: Shard) -> RankConfig {
        RankConfig { shard, ..RankConfig::new(flash(false), Options::default()) }
    }

    #[test]
    fn a_rank_loads_its_weights_and_widens_one_of_each_layer() {
        for ranks in [1, 2, 4, 8] {
            let config = rank(Shard { rank: 0, ranks });
            let bytes = ModelBytes::of::<DeepSeekV4>(&config).unwrap();
            let model = &config.model;
            let wide = model.layers.len() * model.o_lora_rank * model.heads * model.head_dim * 2 / ranks;
            assert_eq!((bytes.weights, bytes.derived), (weight_bytes(model, ranks).unwrap(), wide as u64));
        }
    }

    #[test]
    fn the_official_shapes_take_two_large_gpus_or_four_of_80_gb() {
        let needs = rank_bytes::<DeepSeekV4>(&rank(Shard::WHOLE), &options()).unwrap();
        assert_eq!(needs.iter().map(|need| need.ranks).collect::<Vec<_>>(), [1, 2, 4, 8]);
        let free = |gigabytes: u64, gpus| vec![gigabytes * 1_000_000_000; gpus];
        assert_eq!(fewest_ranks(&needs, &free(141, 8)), Ok(2));
        assert_eq!(fewest_ranks(&needs, &free(80, 8)), Ok(4));
        assert_eq!(fewest_ranks(&needs, &free(190, 1)), Ok(1));
        let one = fewest_ranks(&needs, &free(141, 1)).unwrap_err();
        assert!(one.contains("141.0 GB is free on the one GPU: 2 such GPUs hold it"), "{one}");
    }

    /// Two H200s, and eight GPUs of 48 GB.
    #[test]
    fn sequences_and_cache_follow_the_memory_of_the_gpus() {
        for (ranks, gigabytes, sequences, snapshots, kv) in
            [(2, 141, 256, 100..1000, 20..50), (8, 48, 256, 100..1000, 5..25)]
        {
            let fit =
                GpuFit::new::<DeepSeekV4>(&rank(Shard::WHOLE), &options(), ranks, gigabytes * 1_000_000_000).unwrap();
            println!("{fit}");
            assert_eq!((fit.sequences, fit.step_tokens), (sequences, MAX_DEFAULT_TOKENS));
            assert!(snapshots.contains(&fit.snapshots) && kv.contains(&(fit.kv / 1_000_000_000)), "{fit}");
        }
    }
}
